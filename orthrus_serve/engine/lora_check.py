"""Refuses an adapter that would not change the model as its files say.

A generate engine loads an adapter saved from a headless model (keys `base_model.model.layers.*`) without an error, pays for
it, and changes nothing: every vector would come from the bare model, with a 200. Renaming is done before (`adapter_keys.py`);
this is the last line of defence, in the worker, where the modules are known.
"""

from typing import Any

from orthrus_serve.errors import AdapterError


def unbound_modules(adapter_modules: set[str], model_modules: set[str]) -> tuple[list[str], int]:
    """Adapter modules that no module of the model takes, and the number that are taken."""
    unbound = sorted(adapter_modules - model_modules)
    return unbound, len(adapter_modules) - len(unbound)


def require_bound(runner: Any, lora_request: Any) -> None:
    """Raises AdapterError unless every module of a loaded adapter found its place in the model.

    With pipeline parallelism a rank holds a part of the layers, so there only an adapter that binds nowhere is refused.
    """
    manager = runner.lora_manager._adapter_manager
    lora = manager.get_adapter(lora_request.lora_int_id)
    if lora is None:
        raise AdapterError(f"adapter {lora_request.lora_name!r} was loaded but is not registered; this is a bug")
    unbound, num_bound = unbound_modules(set(lora.loras), set(manager.modules))
    pipelined = runner.vllm_config.parallel_config.pipeline_parallel_size > 1
    if num_bound == 0 or (unbound and not pipelined):
        first = ", ".join(unbound[:3])
        raise AdapterError(
            f"adapter {lora_request.lora_name!r} ({lora_request.lora_path}): {len(unbound)} of "
            f"{len(unbound) + num_bound} modules match no module of the model (first: {first}), so it would serve wrong "
            "vectors. Was it trained on another model, or saved with other key names?"
        )
