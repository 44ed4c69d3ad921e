"""What the package offers: plan, run, open, watch, check and compare studies of one run or of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from iclperm import external
from iclperm.base import remote
from iclperm.endpoint.keys import KeyHosts, SendKeys
from iclperm.errors import ConfigError
from iclperm.external import Tensor
from iclperm.external.unanswered import without_unanswered
from iclperm.grids.costs import GridPlan
from iclperm.grids.folder import GridFolder
from iclperm.grids.grid import Grid, cells
from iclperm.grids.running import GridRuns, is_finished, planned, run_cells
from iclperm.progress import shown_progress
from iclperm.runs import audit
from iclperm.runs.answering import Engines
from iclperm.runs.audit import RunStatus, Verification
from iclperm.runs.execute import Local, run_one
from iclperm.runs.finish import open_one
from iclperm.runs.formats import has_begun, is_grid, is_several
from iclperm.runs.limits import WorkLimits
from iclperm.runs.plan import StudyPlan, plan_one
from iclperm.runs.progress import Progress, Watcher
from iclperm.runs.scorers import LocalModel
from iclperm.studies import kept, several
from iclperm.studies.compared import Compared, of_array, of_run, short_names
from iclperm.studies.comparing import comparing
from iclperm.studies.comparing_findings import Comparing, GradedComparing
from iclperm.studies.comparing_page import write_comparison
from iclperm.studies.page import write_page
from iclperm.studies.planning import PrecisionPlan, precision_plan
from iclperm.studies.recommended_study import recommended_study
from iclperm.studies.report import Run
from iclperm.studies.several import StudyRuns
from iclperm.studies.stages import load
from iclperm.study import kinds
from iclperm.study.choices import shown
from iclperm.study.metrics import common_metric
from iclperm.study.study import Study
from iclperm.workers.driver import PoolOf
from iclperm.workers.local import local_workers

Comparable: TypeAlias = str | Path | Run | StudyRuns | Tensor

__all__ = [
    "compare",
    "open_grid",
    "open_run",
    "plan",
    "plan_grid",
    "plan_sizes",
    "recommend",
    "run",
    "run_grid",
    "status",
    "verify",
    "write_comparison",
    "write_page",
]


def run(
    study: Study,
    out: str | Path | None = None,
    *,
    extend: bool = False,
    mixed: bool = False,
    progress: Progress | Watcher | bool | None = None,
    limits: WorkLimits | None = None,
    send_keys: SendKeys | None = None,
    with_text: bool | None = None,
    workers: int | None = None,
    ray: str | bool | None = None,
) -> Run | StudyRuns:
    """Runs a study, or what is missing of it in the run folder ``out``; without a folder results are kept in memory.

    ``out`` is the study's own unless given. ``extend`` lets a run grow in sets, permutations and queries; what is there
    stays. ``mixed`` accepts parts whose last bits may differ, from another machine or version. Several processes may
    run one study into one folder. The device that begins a run cuts its work, and the folder says how; ``limits`` that
    are given in place of that must be given alike in every session of the folder. ``send_keys`` name the hosts that
    keys may go to by their variables, as ``{"OPENAI_API_KEY": "api.openai.com"}``: the key that a study's endpoint
    wants is sent nowhere else. The folder keeps the texts of all prompts in texts.parquet unless ``with_text`` is
    False, or the task's data may not be handed on and it is not True. A kind that could not be reported is refused
    before anything is computed.

    ``workers`` have the model run in so many processes, each on a GPU or a group of cores of its own: results are those
    of one process with as many threads as each of them. With ``ray``, the address of a Ray cluster, or True for the one
    that runs here, they are on its machines: as many as there are GPUs, or nodes, unless ``workers`` says otherwise.

    ``progress`` is True for a bar on a terminal or in a notebook, and lines elsewhere (`iclperm.progress`): model and
    stage, tokens and parts, and the time left. Else a function, called with the numbers of finished parts and of all
    parts, once the data are tokenised and the model is loaded, and after each part; or an `iclperm.progress.Watcher`,
    told every stage and every few seconds.

    Raises `ConfigError`, `DataError`, `TokenizationError` or `ModelError` for what does not fit, `KeyNotNamed` for a
    key at a host that nobody named, `RunError` for a folder of another run, `RunStopped` where the folder cannot be
    written or memory does not suffice. Cost: the plan's distinct tokens, each once.
    """

    _refuse_url(out or study.out)
    if workers is not None or ray:
        _refuse_workers(study)
    terms = _Terms(extend, mixed, limits, send_keys, with_text)
    with _watched(progress) as watcher, _answering(workers, ray, mixed) as local:
        return _run(study, out, terms, watcher, local)


def recommend(
    data: str | Path,
    out: str | Path | None = None,
    *,
    label: str | None = None,
    texts: Sequence[str] = (),
    extend: bool = False,
    progress: Progress | Watcher | bool | None = None,
    workers: int | None = None,
    with_text: bool | None = None,
    **choices: Any,
) -> StudyRuns:
    """How many demonstrations, which, in what order: the prompt to take for ``data``, and what it is worth.

    ``data`` is a data file (a task is proposed from it and written beside ``out``, with the columns ``label`` and
    ``texts`` where they are named), a task file, or a built-in task. ``choices`` are keys of a study of the kind
    recommend, such as ``model`` and ``budget``; sizes that they do not name follow from the data. All else is as for
    `run`: the same call continues what was interrupted, and ``extend`` lets the test grow in ``queries``.

    ``findings()`` say which prompt, ``prompt()`` is it. Raises what `run` raises.
    """
    study = recommended_study(data, out, choices, label=label, texts=texts)
    found = run(study, out, extend=extend, progress=progress, workers=workers, with_text=with_text)
    assert isinstance(found, StudyRuns)
    return found


class _Terms(NamedTuple):
    """How runs are made, as `run` has it."""

    extend: bool
    mixed: bool
    limits: WorkLimits | None
    send_keys: SendKeys | None
    with_text: bool | None


def _run(
    study: Study, out: str | Path | None, terms: _Terms, watcher: Progress | Watcher | None, local: Local
) -> Run | StudyRuns:
    kind = kinds.named(study.kind)
    load(kind)
    keys = KeyHosts(terms.send_keys, None if kind.stages is None else several.identifier(study))

    def one(study: Study, out: str | Path | None) -> Run:
        done = run_one(study, out, terms.extend, terms.mixed, watcher, terms.limits, keys, terms.with_text, local)
        return Run.of(done)

    if kind.stages is not None:
        parts = Path(out or study.out or "") if out or study.out else None
        return several.run_all(study, parts, one)
    return one(study, out)


def plan_grid(grid: Grid, out: str | Path | None = None, *, told: Callable[[str], None] | None = None) -> GridPlan:
    """What the cells of a grid cost that are not finished in its folder, in the order in which they would run.

    A cell whose model or data are not here is reckoned by typical lengths where its model is one of the papers', and
    says so. ``told`` hears of each cell by its name. Cost: that of `plan` for each cell.
    """
    place = out or grid.out
    folder = GridFolder(Path(place)) if place and is_grid(place) else None
    return planned(cells(grid), folder, plan, told or (lambda _: None))


def run_grid(
    grid: Grid,
    out: str | Path | None = None,
    *,
    extend: bool = False,
    mixed: bool = False,
    progress: Progress | Watcher | bool | None = None,
    limits: WorkLimits | None = None,
    send_keys: SendKeys | None = None,
    with_text: bool | None = None,
    workers: int | None = None,
    ray: str | bool | None = None,
    told: Callable[[str, str | None], None] | None = None,
    costs: GridPlan | None = None,
) -> GridRuns:
    """Runs the cells of a grid that are not finished in its folder ``out``, the cheapest first and those of one model
    after each other, so that it is loaded once a worker.

    A cell that fails (its model is not there, its data are bad, memory did not suffice) keeps the reason, and the rest
    goes on; the same call tries it again. ``told`` hears of each cell as it begins, and with the reason where it
    failed; ``costs`` is what `plan_grid` said, if it was asked. All else is as for `run`, for each cell.

    Raises `ConfigError` where there is no folder, and `RunError` for one that holds something else.
    """
    place = out or grid.out
    if not place:
        raise ConfigError("a grid has no folder; give one: out, or the grid's key 'out'")
    _refuse_url(place)
    there = cells(grid)
    if workers is not None or ray:
        for cell in there.values():
            _refuse_workers(cell.study)
    folder = GridFolder.claim(Path(place), grid)
    costs = costs or plan_grid(grid, place)
    terms = _Terms(extend, mixed, limits, send_keys, with_text)
    with _watched(progress) as watcher, _answering(workers, ray, mixed) as local:

        def one(study: Study, cell: Path) -> Run | StudyRuns:
            return _run(study, cell, terms, watcher, local)

        run_cells(folder, there, costs, one, told or (lambda *_: None))
    return open_grid(place)


def open_grid(path: str | Path) -> GridRuns:
    """A grid from its folder: which cells are finished, and why others failed. Opens no cell."""
    folder = GridFolder.open(Path(path))
    there = folder.cells()
    failed = {name: words for name, words in folder.failures().items() if name in there}
    finished = tuple(
        name for name, cell in there.items() if name not in failed and is_finished(folder.place(name), cell.study)
    )
    return GridRuns(folder.path, there, finished, failed, open_run)


def _refuse_url(place: str | Path | None) -> None:
    remote.refuse_url(place, "mount it, and name the folder there: a run commits its files one by one")


def _refuse_workers(study: Study) -> None:
    if study.endpoint is not None:
        raise ConfigError(
            "a model behind an API has no workers here: its requests are all sent from one process, within one budget; "
            "leave out workers and ray"
        )


@contextmanager
def _answering(workers: int | None, ray: str | bool | None, mixed: bool) -> Iterator[Local]:
    """What answers one run after the other, within: this process, or the workers that were asked for. A model is loaded
    once for runs that follow each other."""
    if workers is None and not ray:
        yield partial(LocalModel, engines=Engines())
        return
    if not ray:
        pools: PoolOf[Any] = local_workers(workers or 0, is_mixed=mixed)
    else:
        try:
            from iclperm.workers.cluster import RayPools
        except ImportError as error:
            raise ConfigError(f"there is no Ray here ({error}); pip install 'iclperm[ray]'") from None
        pools = RayPools(workers, "auto" if ray is True else ray, is_mixed=mixed)
    with closing(pools):
        yield pools


def _watched(progress: Progress | Watcher | bool | None) -> AbstractContextManager[Progress | Watcher | None]:
    """Who is told of a run's progress, within; of True what is shown."""
    if isinstance(progress, bool):
        return shown_progress() if progress else nullcontext()
    if not (progress is None or callable(progress) or isinstance(progress, Watcher)):
        raise ConfigError(f"progress is {shown(progress)}; give True, a function of two numbers, or a Watcher")
    return nullcontext(progress)


def plan(study: Study) -> StudyPlan | dict[str, StudyPlan]:
    """What ``study`` will compute: needs data, tokenizer and the model's configuration, no weights.

    Of a study of several runs the plan of each, by name. Raises the errors of `run` that can be known beforehand.
    O(tokens of demonstrations and queries), and a second to estimate the time, which is left out for a device that
    this machine lacks.
    """
    kind = kinds.named(study.kind)
    load(kind)
    return plan_one(study) if kind.stages is None else several.plans(study, plan_one)


def plan_sizes(
    study: Study,
    precision: str | None = None,
    *,
    pilot: str | Path | Run | None = None,
    components: str | None = None,
) -> PrecisionPlan:
    """The cheapest sets, permutations and queries of a study that is to know something to a precision.

    ``precision`` is the study's own unless given, as "order_effect +- 0.01"; also selection_effect, r, accuracy (at 4),
    difference of 0 and 4, rank of shapley. What varies how much is told by a ``pilot``, a finished run or its folder,
    or by ``components`` as "order=.05,selection=.03,accuracy=.7". See `iclperm.studies.planning.precision_plan`, also
    for what it raises. Cost: that of `plan` for each of a handful of choices.
    """
    wanted = precision or study.precision
    if wanted is None:
        raise ConfigError('there is no precision to be sized; give one, such as --precision "order_effect +- 0.01"')
    run = open_run(pilot) if isinstance(pilot, str | Path) else pilot
    if isinstance(run, StudyRuns):
        raise ConfigError(f"{run.folder} holds several runs; give one of them as a pilot")
    return precision_plan(study, wanted, pilot=run, components=components)


def open_run(
    path: str | Path, *, normalize: str | None = None, criterion: str | None = None, unparsed: str | None = None
) -> Run | StudyRuns:
    """A finished run, or the runs of a study of several, from its folder alone: see `iclperm.runs.finish.open_one`.

    The answers of a run of more than 16.8 million are read when one is first asked for; a damaged file is told then.
    Of a URL (`iclperm.base.remote`) a copy is fetched, opened, and gone when the interpreter ends.
    """
    path = remote.local(path)
    if is_several(path):
        return several.open_all(Path(path), normalize=normalize, criterion=criterion, unparsed=unparsed)
    return Run.of(open_one(path, normalize=normalize, criterion=criterion, unparsed=unparsed, may_wait=True))


def status(path: str | Path) -> RunStatus | dict[str, RunStatus]:
    """How far a run is; of a study of several runs those that have begun, by name.

    Of a grid those of its cells that have begun. Reads names of files and records, no answers. Raises `RunError` for a
    folder that is no run.
    """
    if is_grid(path):
        return _of_cells(path, status)
    if is_several(path):
        return {name: audit.status(folder) for name, folder in several.begun(Path(path), may_read=False)[0].items()}
    return audit.status(path)


def verify(path: str | Path) -> Verification | dict[str, Verification]:
    """Checks every byte of a run folder and changes nothing; of a study of several runs those that have begun, by name.

    Where what stages chose is damaged, that is listed by the name of its file. Raises `RunError` for a folder that is
    no run at all. Of a grid, those of its cells that have begun. O(size of the folder).
    """
    if is_grid(path):
        return _of_cells(path, verify)
    if not is_several(path):
        return audit.verify(path)
    found = {name: audit.verify(folder) for name, folder in several.begun(Path(path), may_read=True)[0].items()}
    if damage := kept.damage(Path(path)):
        found[kept.NAME] = Verification(Path(path), damage, 0, 0, None)
    return found


def _of_cells(path: str | Path, tell: Callable[[Path], Any]) -> dict[str, Any]:
    """What is told of each cell that has begun, by its name, and by that of its run where it has several."""
    folder = GridFolder.open(Path(path))
    found: dict[str, Any] = {}
    for name in folder.cells():
        if has_begun(folder.place(name)):
            told = tell(folder.place(name))
            found |= {f"{name}/{run}": one for run, one in told.items()} if isinstance(told, dict) else {name: told}
    return found


def compare(
    studies: Comparable | Sequence[Comparable],
    *others: Comparable,
    shared: str | Sequence[str] | None = None,
    sizes: Sequence[float] | None = None,
    titles: Sequence[tuple[str, str]] | None = None,
) -> Comparing:
    """Two or more finished studies side by side: r, order and selection effect, accuracy, and all of them pooled.

    Each of ``studies``, in a list or one after the other, is a run or its folder, a study of several runs, of which
    each counts, or answers from elsewhere: a `Tensor` or the path of a file that `iclperm.external.load` reads. What
    runs have in common is found by the contents of their demonstrations and queries and by what fixed their
    permutations; of other answers that is not known, unless ``shared`` says for all what they share, level by level:
    some of "sets,permutations,queries", or a list of them. ``sizes`` are the numbers of parameters of the studies'
    models, in the same order, for a slope. ``titles`` say what tables call the task and the model of each, in the
    same order; else they have the names that are in the runs. Of a study of several runs the tasks keep their own.

    Raises `ConfigError` for fewer than two, for other than one title each and for one that is named twice, `RunError`
    for a run that is not finished, and what `open_run` and `load` raise. Reads every run once; O(S·P·K·Q) for every two
    of them.
    """
    is_one = isinstance(studies, str | Path | Run | StudyRuns | Tensor) or hasattr(studies, "__array__")
    first: Any = [studies] if is_one else studies
    studies = [*first, *others]
    for given in studies:
        if not isinstance(given, str | Path | Run | StudyRuns | Tensor):
            raise ConfigError(
                f"studies are runs, folders, files or Tensors, and one is of {type(given).__name__}; "
                "iclperm.stats.compare compares arrays"
            )
    shared = shared.replace(",", " ").split() if isinstance(shared, str) else shared
    paths = [Path(given).resolve() for given in studies if isinstance(given, str | Path)]
    if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        raise ConfigError(f"{twice[0]} is named twice; a study differs from others alone")
    if titles is not None and len(titles) != len(studies):
        raise ConfigError(f"there are {len(studies)} studies and {len(titles)} titles; give a task and model for each")
    found: list[tuple[Run | Tensor, tuple[str, str]]] = []
    for given, title in zip(studies, titles or repeat(None), strict=False):
        one = _opened(given) if isinstance(given, str | Path) else given
        found += _titled(one, title)
    of_runs = [(title, one.folder) for one, title in found if isinstance(one, Run)]
    names = iter(short_names([title for title, _ in of_runs], [folder for _, folder in of_runs]))
    said = comparing([_compared(one, title, names) for one, title in found], shared=shared, sizes=sizes)
    own = [
        f"{study.name}: {words}"
        for study, (one, _) in zip(said.studies, found, strict=True)
        if isinstance(one, Run)
        for words in one.warnings
    ]
    said = replace(
        said,
        runs=tuple(None if isinstance(one, Tensor) else one for one, _ in found),
        warnings=(*said.warnings, *dict.fromkeys(own)),
    )
    metric = common_metric([one.metric for one, _ in found if isinstance(one, Run)])
    return said if metric is None else GradedComparing.of(said, metric.said)


def _opened(path: str | Path) -> Run | StudyRuns | Tensor:
    """A folder of a run or of several, else a file of answers."""
    if is_several(path) or has_begun(Path(path)) or not Path(path).is_file():
        return open_run(path)
    return external.load([path])


def _titled(one: Run | StudyRuns | Tensor, title: tuple[str, str] | None) -> list[tuple[Run | Tensor, tuple[str, str]]]:
    """The runs of a study, or its one table of answers, and the task and model that tables name for each."""
    if isinstance(one, StudyRuns):
        return [(run, (run.task, title[1] if title else Path(run.study.model_name).name)) for run in one.runs.values()]
    if isinstance(one, Tensor):
        return [(one, title or ("", ""))]
    return [(one, title or (one.task, Path(one.study.model_name).name))]


def _compared(one: Run | Tensor, title: tuple[str, str], names: Iterator[str]) -> Compared:
    task, model = title
    if isinstance(one, Tensor):
        one = without_unanswered(one)
        levels = {axis: tuple(map(str, getattr(one, axis))) for axis in ("sets", "permutations", "queries")}
        found = of_array(one.title, one.values, one.axes, one.state, one.weights, one.shots, one.classes)
        return replace(found, called=levels, notes=one.notes, task=task, model=model)
    return replace(of_run(next(names), one), task=task, model=model)
