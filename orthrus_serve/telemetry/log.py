"""Events with ids on the standard logger: `request_rejected request_id=r1 load=4096`. Leaves out handlers and levels."""

import json
import logging
from dataclasses import dataclass


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
            self.logger.log(level, "%s", format_event(event, fields), exc_info=exc_info, stacklevel=3)


def event_log(name: str) -> EventLog:
    """The event log of a module: `log = event_log(__name__)`."""
    return EventLog(logging.getLogger(name))


def format_event(event: str, fields: dict[str, object]) -> str:
    """One line, whatever the values hold: anything but plain words and numbers is quoted as in JSON."""
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in fields.items())])


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = bool(text) and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if is_plain else json.dumps(text)
