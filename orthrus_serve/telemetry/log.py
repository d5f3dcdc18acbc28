"""Events with ids on the standard logger: `request_rejected request_id=r1 load=4096`.

Processes of the server call `configure`; elsewhere events go wherever the standard logger sends them.
"""

import json
import logging
import sys
from dataclasses import dataclass

from typing_extensions import override


@dataclass(frozen=True)
class EventLog:
    """A logger whose messages are an event's name and its fields."""

    logger: logging.Logger

    def debug(self, event: str, **fields: object) -> None:
        """For those who look closely."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Something that an operator may want to know."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something that an operator should look at."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Something that failed."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """The same, with the traceback of the exception being handled."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def _write(self, level: int, event: str, fields: dict[str, object], exc_info: bool = False) -> None:
        if self.logger.isEnabledFor(level):
            # stacklevel: the line of the caller, not of this file.
            told = {"event": event, "fields": fields}
            self.logger.log(level, "%s", format_event(event, fields), exc_info=exc_info, stacklevel=3, extra=told)


def event_log(name: str) -> EventLog:
    """The event log of a module: `log = event_log(__name__)`."""
    return EventLog(logging.getLogger(name))


class _JsonFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", record.getMessage()),
            **{key: value if isinstance(value, int | float | None) else str(value) for key, value in fields.items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str, *, as_json: bool, root: str = "orthrus_serve") -> None:
    """Sends the events of this package to the process's standard error, one line each. Replaces what was set before."""
    logger = logging.getLogger(root)
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(_JsonFormatter() if as_json else plain)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def format_event(event: str, fields: dict[str, object]) -> str:
    """One line, whatever the values hold: anything but plain words and numbers is quoted as in JSON."""
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in fields.items())])


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = bool(text) and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if is_plain else json.dumps(text)
