"""The tiny model and the in-process engine that the engine suite drives."""

import json
import random
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm import PoolingParams, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.llm_engine import LLMEngine

from orthrus_serve.engine.settings import LiveSettings
from orthrus_serve.reference.decoder import ReferenceDecoder

VOCAB_SIZE = 512
HIDDEN_SIZE = 128
POOLINGS = ("last", "mean", "weighted_mean", "cls")
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class TinyModel:
    """Folders of the model and its adapter, and what they should answer."""

    model: Path
    adapter: Path

    @cached_property
    def reference(self) -> ReferenceDecoder:
        """Transformers and peft over both folders."""
        return ReferenceDecoder.load(self.model, {"adapter": self.adapter})

    def vector(
        self, token_ids: list[int], pooling: Any, *, normalize: bool = True, dimensions: int | None = None
    ) -> torch.Tensor:
        """The embedding that Transformers and peft give, fp32 `[dimensions or hidden size]`."""
        return self.reference.vector(token_ids, "adapter", pooling=pooling, normalize=normalize, dimensions=dimensions)

    def greedy(self, token_ids: list[int], count: int, *, adapted: bool = False) -> list[int]:
        """The tokens that Transformers generates greedily, with or without the adapter, end-of-sequence tokens included."""
        return self.reference.greedy(token_ids, count, "adapter" if adapted else None)

    def next_logits(self, token_ids: list[int], following: list[int], *, adapted: bool = False) -> torch.Tensor:
        """Logits that Transformers gives before each token of `following`, `[len(following), vocabulary]`."""
        return self.reference.next_logits(token_ids, following, "adapter" if adapted else None)


def make_tiny_model(folder: Path) -> TinyModel:
    """A two-layer Llama with random weights, a word tokenizer and a rank-8 adapter on every linear layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder / "model")
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m.content }} {% endfor %}",
    ).save_pretrained(folder / "model")  # fmt: skip
    return TinyModel(folder / "model", add_tiny_adapter(model, folder / "adapter", 1))


def add_tiny_adapter(model: Any, folder: Path, seed: int) -> Path:
    """Saves a rank-8 adapter with random weights for a model, which is left without it. Returns its folder."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, bias="none", target_modules=ALL_LINEAR))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.1)
    adapted.save_pretrained(folder)
    adapted.unload()
    return folder


def token_ids(rng: random.Random, length: int) -> list[int]:
    """Random prompt tokens without special ones."""
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


class Engine:
    """vLLM's LLMEngine in this process, mixed (default) or stock, driven a step at a time."""

    def __init__(
        self,
        tiny: TinyModel,
        step_log: Path,
        *,
        mixed: bool = True,
        policy: str = "orthrus",
        budget: int = 64,
        min_share: float = 0.125,
        async_scheduling: bool = False,
        live: dict[str, Any] | None = None,
        adapters: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        self.tiny = tiny
        self.step_log = step_log
        options: dict[str, Any] = {
            "model": str(tiny.model), "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True,
            "dtype": "float32", "max_num_batched_tokens": budget, "max_num_seqs": min(32, budget - 2), "enable_lora": True,
            "max_lora_rank": 8, "max_loras": 1, "enable_prefix_caching": False, "block_size": 32,
            "kv_cache_memory_bytes": 64 * 2**20, "disable_log_stats": True,
        }  # fmt: skip
        if mixed:
            settings = {
                "live": {"policy": policy, "min_share": min_share} | (live or {}),
                "step_log": str(step_log),
                "adapters": adapters or {},
            }
            name = "MixedAsyncScheduler" if async_scheduling else "MixedScheduler"
            options |= {
                "worker_cls": "orthrus_serve.engine.worker.MixedCPUWorker",
                "scheduler_cls": f"orthrus_serve.engine.scheduler.{name}",
                "additional_config": {"orthrus": settings},
            }
        options |= overrides
        self._has_adapters = bool(options["enable_lora"])
        with _async_scheduling_on_cpu(async_scheduling):
            self.llm = LLMEngine.from_engine_args(EngineArgs(**options))
        self.results: dict[str, Any] = {}
        self.finish_order: list[str] = []

    def begin_anew(self, **live: Any) -> None:
        """For engines that tests share: the given live settings, and no result, step or total from before."""
        answer = self.scheduler.answer("set", asdict(LiveSettings()) | live)
        assert answer["refused"] is None, answer
        recorder = self.scheduler.recorder
        recorder.totals = type(recorder.totals)()
        self.step_log.write_text("")
        self.results.clear()
        self.finish_order.clear()

    @property
    def scheduler(self) -> Any:
        return self.llm.engine_core.engine_core.scheduler  # type: ignore[attr-defined]

    @property
    def runner(self) -> Any:
        return self.llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]

    def generate(
        self, request_id: str, prompt: list[int], max_tokens: int = 24, *, adapter: Path | None = None, **sampling: Any
    ) -> None:
        """Adds a generation; greedy and without an adapter unless told otherwise."""
        params = SamplingParams(
            **({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False} | sampling)
        )
        lora = None if adapter is None else self._second(adapter)
        self.llm.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=lora)

    def embed(
        self, request_id: str, prompt: list[int], pooling: str = "last", *, adapter: Path | None = None, **extra: Any
    ) -> None:
        """Adds an embedding with the tiny adapter (or another folder); without one where the engine takes none."""
        params = PoolingParams(task="embed", extra_kwargs={"pooling": pooling, **extra})
        lora = None if adapter is None else self._second(adapter)
        if lora is None and self._has_adapters:
            lora = LoRARequest("orthrus-embed", 1, str(self.tiny.adapter))
        self.llm.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=lora)

    @staticmethod
    def _second(adapter: Path) -> LoRARequest:
        return LoRARequest(adapter.name, 2, str(adapter))

    def step(self) -> None:
        """One engine step."""
        for output in self.llm.step():
            if output.finished:
                self.results[output.request_id] = output
                self.finish_order.append(output.request_id)

    def run(self, *, most: int = 5000) -> None:
        """Steps until nothing is left. Fails rather than turning for ever."""
        for _ in range(most):
            if not self.llm.has_unfinished_requests():
                break
            self.step()
        else:
            raise AssertionError(f"unfinished after {most} steps")
        while self.scheduler.has_requests():  # lets the worker hear of the last finished requests
            self.step()

    def tokens(self, request_id: str) -> list[int]:
        return list(self.results[request_id].outputs[0].token_ids)

    def vector(self, request_id: str) -> torch.Tensor:
        return self.results[request_id].outputs.data.float()

    def cosine(self, request_id: str, prompt: list[int], pooling: str) -> float:
        """Cosine of a finished embedding to the reference."""
        return float(
            torch.nn.functional.cosine_similarity(self.vector(request_id), self.tiny.vector(prompt, pooling), dim=0)
        )

    def steps(self) -> list[dict[str, Any]]:
        """What each step held, from the step log."""
        return [json.loads(line) for line in self.step_log.read_text().splitlines()]

    def leaks(self) -> dict[str, int]:
        """What should be zero once nothing is in flight."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(self.scheduler.requests),
            "waiting": len(self.scheduler.waiting),
            "waiting_tokens": sum(self.scheduler.waiting.waiting_tokens(lane) for lane in (0, 1)),
            "pooling_states": len(self.runner.pooler_progress),
            "kv_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def totals(self) -> dict[str, int]:
        return asdict(self.scheduler.recorder.totals)

    def close(self) -> None:
        self.llm.engine_core.shutdown()


class _async_scheduling_on_cpu:  # noqa: N801  reads as a statement
    """Keeps async scheduling on where vLLM's CPU platform forces it off: test only, so that CUDA's scheduler is tested here."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._stock = CpuPlatform.__dict__["check_and_update_config"]

    def __enter__(self) -> None:
        if self._wanted:
            stock = self._stock.__func__

            def keep_on(cls: type, config: Any) -> None:
                stock(cls, config)
                config.scheduler_config.async_scheduling = True

            CpuPlatform.check_and_update_config = classmethod(keep_on)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        CpuPlatform.check_and_update_config = self._stock
