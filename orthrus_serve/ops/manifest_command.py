"""`orthrus-serve manifests FILE`: the Kubernetes objects of a Serve file, as text or as files.

Reads and writes; what is written is decided in `manifests.py`. Leaves out talking to a cluster: `kubectl apply` does.
"""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from orthrus_serve.config.load import ServeFile, read_serve_file
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.manifest_parts import MODELS_FOLDER, Fetch, models_documents
from orthrus_serve.ops.manifests import Choices, PodSize, dump, image_of, names_of, service_documents

PROGRAM = "orthrus-serve manifests"


def main(argv: list[str]) -> int:
    """Prints the objects, or writes one file for each size (and one for the models) into `--out`. Returns 0.

    Raises:
        ConfigError: the Serve file or an option is wrong.
    """
    args = _parser().parse_args(argv)
    texts = generated(args)
    if args.out is None:
        print("---\n".join(texts.values()), end="")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (args.out / name).write_text(text, encoding="utf-8")
        print(args.out / name)
    return 0


def generated(args: argparse.Namespace) -> dict[str, str]:
    """File names and their texts for a parsed command line."""
    file = read_serve_file(args.file)
    raw: dict[str, Any] = yaml.safe_load(Path(args.file).expanduser().read_text(encoding="utf-8"))
    stem = Path(args.file).stem
    fetched = [_parse_fetch(text) for text in args.fetch]
    texts = {f"{stem}-models.yaml": _text(_models(file, args, fetched), args, None)}
    for num_gpus in args.gpus or [None]:
        name = f"{stem}.yaml" if num_gpus is None else f"{stem}-{num_gpus}gpu.yaml"
        texts[name] = _text(service_documents(raw, args.file, _choices(args, num_gpus)), args, num_gpus)
    return texts


def parse(argv: list[str]) -> argparse.Namespace:
    """A command line without the verb."""
    return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Kubernetes objects that run a Serve file with KubeRay.")
    parser.add_argument("file", help="Serve file, such as configs/orthrus.yaml")
    parser.add_argument(
        "--gpus", type=int, nargs="+", metavar="N", help="GPUs in all, one file each (what the file says)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write files into DIR instead of printing")
    parser.add_argument("--namespace", default=Choices.namespace, help=f"({Choices.namespace})")
    parser.add_argument("--image", help="image of every pod (orthrus-serve:VERSION-cuda, or -cpu)")
    parser.add_argument("--cpus", type=int, default=PodSize.cpus, help=f"cores of a worker pod ({PodSize.cpus})")
    parser.add_argument("--memory", default=PodSize.memory, help=f"memory of a worker pod ({PodSize.memory})")
    parser.add_argument("--storage", default="100Gi", help="size of the volume with the models (100Gi)")
    parser.add_argument("--storage-class", help="one that many nodes can mount at once (the cluster's default)")
    parser.add_argument(
        "--fetch",
        action="append",
        default=[],
        metavar="REPOSITORY[:FILES]=FOLDER",
        help="fetch this from the Hugging Face hub into a folder of the volume, such as org/model=~/models/model",
    )
    parser.add_argument("--high-throughput", action="store_true", help="HAProxy in place of Ray Serve's Python proxy")
    operator, monitoring = Choices.operator_namespace, Choices.monitoring_namespace
    parser.add_argument("--operator-namespace", default=operator, help=f"where KubeRay's operator runs ({operator})")
    parser.add_argument("--monitoring-namespace", default=monitoring, help=f"where Prometheus runs ({monitoring})")
    return parser


def _choices(args: argparse.Namespace, num_gpus: int | None) -> Choices:
    return Choices(
        namespace=args.namespace,
        num_gpus=num_gpus,
        image=args.image,
        pod=PodSize(args.cpus, args.memory),
        high_throughput=args.high_throughput,
        operator_namespace=args.operator_namespace,
        monitoring_namespace=args.monitoring_namespace,
    )


def _models(file: ServeFile, args: argparse.Namespace, fetched: list[Fetch]) -> list[dict[str, Any]]:
    application = file.applications[0]
    names = names_of(application, args.namespace)
    return models_documents(names, args.storage, args.storage_class, image_of(application.args, args.image), fetched)


def _parse_fetch(text: str) -> Fetch:
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([^=]+))?=(?:~/models|/models)/([\w./-]+)", text)
    if match is None:
        raise ConfigError(
            f"--fetch: must be REPOSITORY=~/models/FOLDER or REPOSITORY:FILES=~/models/FOLDER, got {text!r}"
        )
    return Fetch(repository=match[1], pattern=match[2], folder=f"{MODELS_FOLDER}/{match[3]}")


def _text(documents: list[dict[str, Any]], args: argparse.Namespace, num_gpus: int | None) -> str:
    return _header(args, num_gpus) + "---\n".join(dump(document) for document in documents)


def _header(args: argparse.Namespace, num_gpus: int | None) -> str:
    """How the file was made, with every option that was not left alone."""
    defaults = vars(_parser().parse_args([args.file]))
    words = [PROGRAM, args.file]
    for key, value in vars(args).items():
        if key in ("file", "gpus", "out") or value == defaults[key]:
            continue
        flag = f"--{key.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [part for one in values for part in (flag, shlex.quote(str(one)))]
    if num_gpus is not None:
        words += ["--gpus", str(num_gpus)]
    command = "\n".join(f"#   {line}" for line in _folded(words))
    return f"# Made by the command below. Do not edit: change the Serve file or the options, and make it again.\n{command}\n"


def _folded(words: list[str]) -> list[str]:
    """A command in lines: each option on its own when it would not fit into one."""
    whole = " ".join(words)
    if len(whole) <= 110:
        return [whole]
    return re.sub(r" (--)", r" \\\n    \1", whole).split("\n")
