"""Ids and kinds that every layer speaks of. No behaviour."""

from typing import Literal, NewType

RequestKind = Literal["generate", "embed"]
PolicyName = Literal["orthrus", "hetero_fcfs", "unified_homo"]
TopologyName = Literal["orthrus", "hetero_fcfs", "unified_homo", "dedicated", "disagg_pd", "separate_models"]
RouterRule = Literal["least_remaining_tokens", "power_of_two", "round_robin", "in_flight_tokens"]
KvConnectorName = Literal["nixl"]
# A generation that two replicas share: one computes the prompt, one the answer.
Half = Literal["prefill", "decode"]
# How two engines on one card share it.
CardShare = Literal["remaining", "static", "whole"]
PoolingKind = Literal["last", "mean", "weighted_mean", "cls", "all"]
Activation = Literal["none", "tanh", "gelu", "relu"]
Reduction = Literal["mean", "max", "last"]
# Fields of vLLM's API that go past its own checks into the engine; closed unless `limits.open_fields` opens them.
ClosedField = Literal["vllm_xargs", "watermarking", "repetition_detection", "routed_experts_prompt_start"]
Priority = Literal["high", "normal", "low"]

RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
LogLevel = Literal["debug", "info", "warning", "error"]
