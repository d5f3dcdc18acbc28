"""Which API keys are let in, by their SHA-256: from the Serve file itself, or from a file that it names.

Guards: a line that is no digest stops the start, so that a key pasted by mistake is not taken for one (nor repeated in the
message). Leaves out comparing (`serving/key_guard.py`).
"""

import re
from pathlib import Path

from orthrus_serve.config.clients import ApiKeysSpec
from orthrus_serve.errors import ConfigError

_DIGEST = re.compile("[0-9a-f]{64}")


def read_digests(spec: ApiKeysSpec) -> frozenset[str]:
    """The digests of all keys. The file has one a line, as its first word; the rest, and lines from # on, are for humans.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no digest.
    """
    digests = set(spec.digests)
    if spec.file is not None:
        try:
            lines = Path(spec.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys.file: {spec.file} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if not _DIGEST.fullmatch(words[0]):
                raise ConfigError(f"api_keys.file: {spec.file}, line {number}: must begin with a key's SHA-256 in hex")
            digests.add(words[0])
    if not digests:
        raise ConfigError("api_keys: holds no key, so nobody could ask; name one, or leave api_keys out")
    return frozenset(digests)
