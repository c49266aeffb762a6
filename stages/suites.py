"""What is expected of each table, as great-expectations suites, and how a suite's outcome is read.

A suite is a list of expectations; each says in words what it checks and about which column. The row count
comes first: on an empty table "no nulls" and "all among" hold, and mean nothing, so the rest is left out.
Outcomes are three, not two:

    passed           it was looked at and holds
    failed           it was looked at and does not hold
    could_not_run    it was not looked at: the column is missing, the table is empty, or the check broke

A critical expectation that did not pass stops the pipeline in both of the last two cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
import logging
import shutil
from typing import TYPE_CHECKING, Any, Literal

import great_expectations as gx
from great_expectations.data_context.types.base import ProgressBarsConfig
import great_expectations.expectations as gxe

from paravt.data.checks import OK, QUESTION_TYPES
from paravt.data.schema import TRACE_KINDS

if TYPE_CHECKING:
    import pandas as pd

SHOWN_ROWS = 5
MOST = 0.95
ROW_COUNT = "expect_table_row_count_to_be_between"


@dataclass(frozen=True)
class Outcome:
    """What one expectation came to. `rows` names the first rows that do not fit, `examples` their values."""

    expectation: str
    column: str | None
    says: str
    severity: Literal["critical", "warning"]
    status: Literal["passed", "failed", "could_not_run"]
    unexpected_count: int = 0
    rows: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    note: str | None = None

    @property
    def stops(self) -> bool:
        return self.severity == "critical" and self.status != "passed"

    def to_json(self) -> dict:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    def sentence(self, suite: str) -> str:
        """Suite, column, what was expected, and the first rows that do not fit."""
        where = f"suite {suite}" + (f", column {self.column}" if self.column else "")
        if self.status == "could_not_run":
            return f"{where}: could not check that {self.says} ({self.note})"
        if not self.rows:
            return f"{where}: {self.says}, but {self.note or 'that does not hold'}"
        found = f": {self.examples[0]}" if self.examples else ""
        noun = "row does" if self.unexpected_count == 1 else "rows do"
        shown = ", ".join(self.rows)
        return f"{where}: {self.says}, but {self.unexpected_count} {noun} not fit, first {shown}{found}"


def question_suite(held_out: bool) -> list[gxe.Expectation]:
    """Expectations of a table of questions; `held_out`: its videos are in no training table."""
    suite = [
        _rows(),
        *_required("id", "video", "question", "question_type", "answer"),
        *_identity(),
        *_questions(""),
        _expect(
            gxe.ExpectColumnDistinctValuesToContainSet,
            "question_type",
            "each question type occurs",
            severity="warning",
            value_set=list(QUESTION_TYPES),
        ),
    ]
    if held_out:
        suite.append(_ok("split_check", "video", "no video is in a training table"))
    return suite


def benchmark_suite(overlap_stops: bool) -> list[gxe.Expectation]:
    """Expectations of a published benchmark as it is asked.

    Public sets have a few rows that are not in order (equal options, spans that end after their video). They
    are named as warnings; that most rows are in order is critical.
    """
    known = {"answer": ("each answer fits its type and options", "answer_check")}
    known |= {
        "video": ("each video opens", "video_check"),
        "span": ("each span lies inside its video", "span_check"),
    }
    most = [
        _ok(column, name, f"{says}, in {MOST:.0%} of the rows", mostly=MOST)
        for name, (says, column) in known.items()
    ]
    few = [_ok(column, name, says, severity="warning") for name, (says, column) in known.items()]
    return [
        _rows(),
        *_required("id", "video", "question", "question_type", "answer"),
        *_identity(),
        _expect(gxe.ExpectColumnValuesToMatchRegex, "question", "no question is blank", regex=r"\S"),
        *most,
        *few,
        _ok(
            "split_check",
            "video",
            "no video is in a training table",
            severity="critical" if overlap_stops else "warning",
        ),
    ]


def published_suite(max_set_aside: float) -> list[gxe.Expectation]:
    """Expectations of published training rows: that they could be used, in the share that is asked for."""
    usable = 1 - max_set_aside
    return [
        _rows(),
        *_required("id", "split", "status"),
        _ok("fate_check", "row", f"at least {usable:.0%} of the rows can be used", mostly=usable),
        _ok("fate_check", "row", "each row can be used", severity="warning"),
    ]


def trace_suite() -> list[gxe.Expectation]:
    """Expectations of the SFT table: the traces, and the questions inside them."""
    names = ("video", "question", "question_type", "answer")
    return [
        _rows(),
        *_required("id", "kind", "frame_budget"),
        _expect(gxe.ExpectColumnToExist, "turn_count", "the column exists", about="turns"),
        *(_expect(gxe.ExpectColumnToExist, f"sample.{name}", "the column exists") for name in names),
        *_identity(),
        _expect(gxe.ExpectColumnValuesToNotBeNull, "kind", "no value is null"),
        _expect(
            gxe.ExpectColumnValuesToBeInSet,
            "kind",
            "each value is main or subagent",
            value_set=list(TRACE_KINDS),
        ),
        _expect(gxe.ExpectColumnValuesToNotBeNull, "frame_budget", "no value is null"),
        _expect(gxe.ExpectColumnValuesToBeOfType, "frame_budget", "values are whole numbers", type_="int64"),
        _expect(gxe.ExpectColumnValuesToBeBetween, "frame_budget", "values are at least 1", min_value=1),
        _expect(gxe.ExpectColumnValuesToNotBeNull, "turn_count", "no value is null", about="turns"),
        _ok("roles_check", "turns", "roles are in order"),
        _ok("target_check", "turns", "each target parses well formed"),
        _ok("window_check", "turns", "each window lies inside its video"),
        _ok("agreement_check", "turns", "the trace's answer is the question's answer", severity="warning"),
        *_questions("sample."),
    ]


def run_suite(
    context: Any, name: str, expectations: list[gxe.Expectation], frame: pd.DataFrame
) -> list[Outcome]:
    """Outcomes in suite order. `context` is an ephemeral great-expectations context; it keeps the results."""
    meta = [expectation.meta or {} for expectation in expectations]
    if frame.empty:
        held = [_unrun(expectation, "the table has no rows") for expectation in expectations[1:]]
        expectations = expectations[:1]
    else:
        held = []
    numbered = []
    for number, expectation in enumerate(expectations):
        numbered.append(expectation.copy(update={"meta": meta[number] | {"number": number}}))
    batches = (
        context.data_sources.add_pandas(name)
        .add_dataframe_asset(name)
        .add_batch_definition_whole_dataframe(name)
    )
    suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=numbered))
    definition = context.validation_definitions.add(
        gx.ValidationDefinition(name=name, data=batches, suite=suite)
    )
    result = definition.run(
        batch_parameters={"dataframe": frame},
        result_format={"result_format": "COMPLETE", "unexpected_index_column_names": ["row"]},
    )
    found = {}
    for item in result.results:
        data = item.to_json_dict()
        found[data["expectation_config"]["meta"]["number"]] = data
    return [_outcome(e, found[i], len(frame)) for i, e in enumerate(expectations)] + held


def new_context() -> Any:
    """An ephemeral context that draws no progress bars and has no site for docs."""
    # this logger sets its own level, and would tell of a folder that is gone two lines later
    logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    for name, site in list((context.variables.data_docs_sites or {}).items()):
        context.delete_data_docs_site(name)
        # the library makes a folder for it in the system's temporary folder, and leaves it there
        shutil.rmtree(site["store_backend"]["base_directory"], ignore_errors=True)
    return context


def _outcome(expectation: gxe.Expectation, data: Mapping[str, Any], rows: int) -> Outcome:
    if problem := _raised(data["exception_info"]):
        return _unrun(expectation, problem)
    result = data["result"]
    indices = result.get("unexpected_index_list") or []
    note = None
    if not data["success"] and not indices:
        observed = result.get("observed_value")
        note = f"{observed!r} was seen" if observed is not None else "it does not"
        if expectation.expectation_type == ROW_COUNT:
            note = f"it has {rows}"
    return Outcome(
        **_described(expectation),
        status="passed" if data["success"] else "failed",
        unexpected_count=int(result.get("unexpected_count") or 0),
        rows=tuple(str(index["row"]) for index in indices[:SHOWN_ROWS]),
        examples=tuple(str(value) for value in _examples(expectation, result)),
        note=note,
    )


def _examples(expectation: gxe.Expectation, result: Mapping[str, Any]) -> Iterable[object]:
    """The first offending values, none for a null."""
    values = result.get("unexpected_list") or []
    return [value for value in values[:SHOWN_ROWS] if value is not None]


def _unrun(expectation: gxe.Expectation, note: str) -> Outcome:
    return Outcome(**_described(expectation), status="could_not_run", note=note)


def _described(expectation: gxe.Expectation) -> dict[str, Any]:
    meta = expectation.meta or {}
    return {
        "expectation": expectation.expectation_type,
        "column": meta.get("about"),
        "says": meta.get("says", expectation.expectation_type),
        "severity": str(getattr(expectation.severity, "value", expectation.severity)),
    }


def _raised(info: Mapping[str, Any]) -> str | None:
    """The first line of what a check raised, or None. The library nests it one level deep, or not at all."""
    entries = [info] if "raised_exception" in info else list(info.values())
    for entry in entries:
        if entry.get("raised_exception"):
            return str(entry.get("exception_message") or "it raised an error").splitlines()[0]
    return None


def _expect(
    kind: type[gxe.Expectation],
    column: str | None,
    says: str,
    severity: str = "critical",
    about: str | None = None,
    **arguments: Any,
) -> gxe.Expectation:
    if column is not None:
        arguments["column"] = column
    return kind(severity=severity, meta={"says": says, "about": about or column}, **arguments)


def _rows() -> gxe.Expectation:
    return _expect(gxe.ExpectTableRowCountToBeBetween, None, "the table has at least 1 row", min_value=1)


def _required(*columns: str) -> list[gxe.Expectation]:
    return [_expect(gxe.ExpectColumnToExist, column, "the column exists") for column in columns]


def _identity() -> list[gxe.Expectation]:
    return [
        _expect(gxe.ExpectColumnValuesToNotBeNull, "id", "no value is null"),
        _expect(gxe.ExpectColumnValuesToBeOfType, "id", "values are texts", type_="str"),
        _expect(gxe.ExpectColumnValuesToBeUnique, "id", "values are unique"),
    ]


def _ok(
    column: str, about: str, says: str, severity: str = "critical", mostly: float = 1.0
) -> gxe.Expectation:
    share = {} if mostly == 1.0 else {"mostly": mostly}
    return _expect(gxe.ExpectColumnValuesToBeInSet, column, says, severity, about, value_set=[OK], **share)


def _questions(prefix: str) -> list[gxe.Expectation]:
    """The expectations of a question, whose columns have `prefix`."""
    names = ("video", "question", "question_type", "answer")
    return [
        *(
            _expect(gxe.ExpectColumnValuesToNotBeNull, f"{prefix}{name}", "no value is null")
            for name in names
        ),
        _expect(gxe.ExpectColumnValuesToMatchRegex, f"{prefix}question", "no question is blank", regex=r"\S"),
        _expect(
            gxe.ExpectColumnValuesToBeInSet,
            f"{prefix}question_type",
            f"each value is one of {', '.join(QUESTION_TYPES)}",
            value_set=list(QUESTION_TYPES),
        ),
        _ok(f"{prefix}answer_check", f"{prefix}answer", "each answer fits its type and options"),
        _ok(f"{prefix}video_check", f"{prefix}video", "each video opens"),
        _expect(
            gxe.ExpectColumnToExist,
            f"{prefix}duration_s",
            "the column exists",
            about=f"{prefix}meta.duration_s",
        ),
        _expect(
            gxe.ExpectColumnValuesToNotBeNull,
            f"{prefix}duration_s",
            "no value is null",
            about=f"{prefix}meta.duration_s",
        ),
        _ok(f"{prefix}span_check", f"{prefix}answer", "each span lies inside its video"),
        _ok(
            f"{prefix}duration_check",
            f"{prefix}meta.duration_s",
            "the duration is that of the file",
            severity="warning",
        ),
    ]
