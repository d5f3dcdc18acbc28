"""Writes reports: JSON (everything), HTML (one file, pictures inside), PNG. Reads the JSON back."""

from pathlib import Path

import msgspec

from loadgen.compare import COMPARE_SCHEMA, CompareReport
from loadgen.errors import SettingsError
from loadgen.html_report import compare_page, run_page
from loadgen.plots import compare_pictures, run_pictures
from loadgen.summary import SCHEMA, RunReport

Report = RunReport | CompareReport


class _Head(msgspec.Struct):
    schema: str = ""


def write_all(report: Report, folder: Path) -> list[Path]:
    """report.json, report.html and one PNG per picture in `folder`, which is made. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(report, RunReport):
        pictures = run_pictures(report)
        page = run_page(report, pictures)
    else:
        pictures = compare_pictures(report)
        page = compare_page(report, pictures)
    files = {"report.json": encode(report), "report.html": page.encode()}
    files |= {f"{name}.png": picture for name, picture in pictures.items()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def encode(report: Report) -> bytes:
    """The report as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def read_report(path: Path) -> Report:
    """A report that `write_all` wrote.

    Raises:
        SettingsError: the file cannot be read or is no report of this version.
    """
    try:
        data = path.expanduser().read_bytes()
        schema = msgspec.json.decode(data, type=_Head).schema
        if schema == SCHEMA:
            return msgspec.json.decode(data, type=RunReport)
        if schema == COMPARE_SCHEMA:
            return msgspec.json.decode(data, type=CompareReport)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{path}: not a report: {error}") from error
    raise SettingsError(f"{path}: not a report of this version (schema {schema!r})")
