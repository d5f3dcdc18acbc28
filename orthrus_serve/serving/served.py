"""What a replica serves, as plain values: names, vocabulary, lengths and limits. Pure data, read once after the start."""

from collections.abc import Mapping
from dataclasses import dataclass

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.errors import ConfigError, RequestError


@dataclass(frozen=True)
class ServedAdapter:
    """An embedding adapter.

    Attributes:
        size: full length of its vectors.
        dimensions: lengths that clients may ask for besides.
        appends_eos: whether the engine appends the end-of-sequence token, which counts as one of an input's tokens.
        max_input_tokens: most tokens of an input where that is less than the model's, else None.
        normalizes: whether vectors have length 1 where a request does not say.
        vocab_size: of a model of its own that embeds, with a vocabulary of its own; None for an adapter.
    """

    size: int
    dimensions: tuple[int, ...] = ()
    appends_eos: bool = True
    max_input_tokens: int | None = None
    normalizes: bool = True
    vocab_size: int | None = None


@dataclass(frozen=True)
class EmbedderFacts:
    """Of a model of its own that embeds: how many tokens it knows, and how many an input may have."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True)
class Served:
    """Facts that a request is checked against.

    Attributes:
        base_name: the name of the model itself, which generates.
        generators: adapters that generate, under names of their own.
        adapters: adapters that embed, and what their requests may ask for.
        base_name_adapter: the adapter that answers `/v1/embeddings` under `base_name`, or None.
        vocab_size: token ids are 0 up to this, exclusive.
        max_model_len: most tokens of a prompt and its output together.
        max_inputs: most inputs, prompts, messages or output sequences of one request.
        max_n: most answers to one prompt.
        max_logprobs: most alternatives reported for each token.
        open_fields: fields of vLLM's API that are open though they are closed by default.
    """

    base_name: str
    generators: frozenset[str]
    adapters: Mapping[str, ServedAdapter]
    base_name_adapter: str | None
    vocab_size: int
    max_model_len: int
    max_inputs: int
    max_n: int
    max_logprobs: int
    open_fields: frozenset[str] = frozenset()

    @property
    def longest_prompt(self) -> int:
        """Most tokens of one input: an answer needs room for one token, and the core refuses a full context for vectors too."""
        return self.max_model_len - 1

    def longest_input(self, adapter: ServedAdapter) -> int:
        """Most tokens of one input of that adapter, the end-of-sequence token included."""
        if adapter.vocab_size is not None and adapter.max_input_tokens is not None:
            return adapter.max_input_tokens  # another model: the generator's context says nothing about it
        return min(self.longest_prompt, adapter.max_input_tokens or self.longest_prompt)

    def vocab_size_of(self, name: str) -> int:
        """How many tokens the model knows that answers under that name."""
        adapter = self.adapters.get(name)
        return self.vocab_size if adapter is None or adapter.vocab_size is None else adapter.vocab_size


def served_by(
    args: AppArgs,
    *,
    base_name: str,
    vocab_size: int,
    max_model_len: int,
    vector_sizes: Mapping[str, int],
    embedder: EmbedderFacts | None = None,
) -> Served:
    """What an engine with this configuration serves; `vector_sizes` has the full length of each embedding adapter's vectors.
    `embedder` goes with `args.embedder`, which then is the only thing that embeds.

    Raises:
        ConfigError: an adapter lists `dimensions` longer than its vectors.
    """
    for name, spec in args.adapters.items():
        too_long = [length for length in spec.dimensions if length > vector_sizes[name]]
        if too_long:
            raise ConfigError(
                f"adapters.{name}.dimensions: {too_long[0]} is more than its {vector_sizes[name]} numbers"
            )
    return Served(
        base_name=base_name,
        generators=frozenset(args.generate_adapters),
        adapters=_embedding(args, vector_sizes, embedder),
        base_name_adapter=args.base_name_adapter,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_inputs=args.limits.max_inputs,
        max_n=args.limits.max_n,
        max_logprobs=args.limits.max_logprobs,
        open_fields=frozenset(args.limits.open_fields),
    )


def _embedding(
    args: AppArgs, vector_sizes: Mapping[str, int], embedder: EmbedderFacts | None
) -> dict[str, ServedAdapter]:
    if args.embedder is not None and embedder is not None:
        spec = args.embedder
        model = ServedAdapter(
            size=vector_sizes[spec.name],
            dimensions=spec.dimensions,
            appends_eos=False,
            max_input_tokens=embedder.max_model_len,
            vocab_size=embedder.vocab_size,
        )
        return {spec.name: model}
    return {
        name: ServedAdapter(
            size=vector_sizes[name],
            dimensions=spec.dimensions,
            appends_eos=spec.append_eos,
            max_input_tokens=spec.head.max_input_tokens if spec.head is not None else None,
            normalizes=spec.normalize,
        )
        for name, spec in args.adapters.items()
    }


def refuse(field: str | None, message: str, *, code: str | None = None) -> RequestError:
    """A 400 that names the field; to be raised by the caller."""
    return RequestError(400, message, param=field, code=code)
