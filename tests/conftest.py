"""Fixtures and hooks of all tests. Only functions import torch, because pytest's main process does not."""

from __future__ import annotations

import gc
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from io import TextIOBase
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import settings
from ready_python import ready_python, ready_ray

if TYPE_CHECKING:
    from tensordict import TensorDict

# torch's threads spin while they wait for work. The variable also limits the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The time of a test depends on what else the machine does, so a slow test is not a failure.
settings.register_profile("headrace", deadline=None, print_blob=True, max_examples=60)
settings.register_profile("quick", settings.get_profile("headrace"), max_examples=20)


ALL_SLOW, ALL_OF_TORCHRL = (
    re.compile(rf"^pytestmark = (\[[^]]*)?pytest\.mark\.{mark}\b", re.M) for mark in ("slow", "torchrl")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="2/3: the second third of the test files, for machines in parallel")


def is_quick(config: pytest.Config) -> bool:
    return config.option.markexpr == "not slow"


@cache
def has_torchrl() -> bool:
    """Whether TorchRL can be imported. It may be installed beside a tensordict that does not fit."""
    try:
        import torchrl.envs  # noqa: F401
    except ImportError:
        return False
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Let property tests try fewer examples in the quick run, and let Ctrl-C end the tests."""
    settings.load_profile("quick" if is_quick(config) else "headrace")
    # A shell may start background jobs with Ctrl-C ignored, and all processes of the tests would ignore it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("HEADRACE_KEPT", mkdtemp())  # workers inherit the folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Start one worker more than there are cores, because slow tests often wait for silent processes."""
    return None if is_quick(config) else (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    for spec in specs:
        spec.python = ready_python()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of another shard, or files whose tests are all left out or skipped."""
    if collection_path.suffix != ".py":
        return None
    if shard := config.getoption("--shard"):
        number, shards = map(int, shard.split("/"))
        if crc32(collection_path.name.encode()) % shards != number - 1:
            return True
    text = collection_path.read_text()
    left_out = is_quick(config) and ALL_SLOW.search(text)
    return True if left_out or (ALL_OF_TORCHRL.search(text) and not has_torchrl()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    for item in items:
        if item.get_closest_marker("torchrl") and not has_torchrl():
            item.add_marker(pytest.mark.skip(reason="TorchRL cannot be imported"))
    # Tests with a cluster come first, all in one process. Other workers take over tests from its end.
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        shutil.rmtree(os.environ.pop("HEADRACE_KEPT"))


def pytest_collection_finish() -> None:
    """Leave imported modules out of garbage collection, which would take half a second more each time."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def clocks_stand_still() -> Iterator[None]:
    """Stop the clock, so that runs of the same batch have the same metrics, even `time/<stage>`."""
    with patch("headrace.pipeline.pipeline.perf_counter", lambda: 0.0):
        yield


@pytest.fixture(autouse=True, scope="session")
def texts_are_parsed_once() -> Iterator[None]:
    """Parse each YAML file and interpolation once, because parsing takes most of the time of composing."""
    import omegaconf._utils
    import omegaconf.base
    import yaml

    load = yaml.load
    loader = cache(omegaconf._utils.get_yaml_loader)  # the same class each time
    parsed = lru_cache(1024)(lambda text, loader: pickle.dumps(load(text, loader)))

    def loaded(stream: Any, Loader: type) -> Any:
        if not isinstance(stream, TextIOBase):
            return load(stream, Loader)
        try:
            return pickle.loads(parsed(stream.read(), Loader))
        except yaml.YAMLError:  # `load` raises an error that names the file
            stream.seek(0)
            return load(stream, Loader)

    trees = lru_cache(4096)(omegaconf.base.parse)  # no test changes the parsed trees
    with (
        patch("yaml.load", loaded),
        patch("omegaconf.base.parse", trees),
        patch("omegaconf._utils.get_yaml_loader", loader),
    ):
        yield


@pytest.fixture(autouse=True, scope="session")
def files_are_merged_once(texts_are_parsed_once: None) -> Iterator[None]:
    """Merge each choice of the package's files once, because Hydra spends most of its time on merging.

    Only the choice of files decides what is merged; Hydra sets each test's own options afterwards. A command
    composes twice, first for `hydra.mode`, which nothing here sets. Then Hydra writes three files that
    nothing here reads.
    """
    from hydra._internal import config_loader_impl
    from hydra._internal.hydra import Hydra
    from hydra.core.config_store import ConfigStore
    from kept import kept

    create = config_loader_impl.create_defaults_list
    merge = config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list

    def once(repository: Any, key: Any, make: Callable[[], Any]) -> Any:
        places = {f"{source.scheme()}://{source.path}" for source in repository.get_sources()}
        if not places <= {"pkg://hydra.conf", "pkg://headrace.conf", "structured://"}:
            return make()
        stored = sorted(ConfigStore.instance().repo)  # TorchRL's groups, once they are registered
        return kept(repr((sorted(places), stored, key)), make)

    def listed(repo: Any, config_name: str, overrides_list: list[Any], **options: Any) -> Any:
        words = [each for each in overrides_list if not each.is_sweep_override()]
        chosen = [
            each for each in words if repo.group_exists(each.key_or_group) and type(each.value()) is not dict
        ]
        key = (config_name, [each.input_line for each in chosen], options)
        found = once(repo, key, lambda: create(repo, config_name, chosen, **options))
        found.config_overrides = [each for each in words if each not in chosen]
        return found

    def merged(loader: Any, defaults: list[Any], repo: Any) -> Any:
        return once(repo, defaults, lambda: merge(loader, defaults, repo))

    with (
        # Hydra copies the store for each composition, and TorchRL has put hundreds of nodes into it.
        patch.object(ConfigStore, "__deepcopy__", lambda store, memo: store, create=True),
        patch.object(config_loader_impl, "create_defaults_list", listed),
        patch.object(config_loader_impl.ConfigLoaderImpl, "_compose_config_from_defaults_list", merged),
        patch.object(Hydra, "get_mode", lambda *_, **__: None),
        patch("hydra.core.utils._save_config", lambda *found: found[2].mkdir(parents=True, exist_ok=True)),
    ):
        yield


@pytest.fixture(scope="session")
def quick(pytestconfig: pytest.Config) -> bool:
    """Whether this is the quick run: no slow tests, and each law on a part of its cases."""
    return is_quick(pytestconfig)


@pytest.fixture(scope="session")
def recipes(quick: bool) -> tuple[str, ...]:
    """The recipes on which laws of advantages are tried."""
    from recipes import ADVANTAGES, FEW

    return FEW if quick else ADVANTAGES


@pytest.fixture
def make_batch() -> Callable[..., TensorDict]:
    """A factory of dense batches in the layout that GRPOLoss takes."""
    from batches import batch_of

    return batch_of


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> Path:
    """A tokenizer whose tokens are single characters."""
    from dumps import letters_tokenizer

    return letters_tokenizer(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    from browser import started

    yield from started()


@pytest.fixture
def look(driver: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from browser import looked_at

    yield from looked_at(driver, tmp_path)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray on this machine; its processes find the modules of the tests and the examples."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    tests = sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")})
    examples = str(Path(__file__).parents[1] / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(examples)
        there = [*tests, examples, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, there)))
        patch.setenv("RAY_worker_niceness", "0")  # by default Ray's processes let other processes run first
        if hasattr(os, "pidfd_open"):
            patch.setattr("ray._private.ray_constants.SETUP_WORKER_FILENAME", ready_ray())
        # More CPUs than the machine has: Ray counts the CPUs that actors might take.
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def queue(cluster: None) -> Iterator[Any]:
    """TransferQueue with one storage unit, on the cluster, and the assembler of its sampler."""
    import transfer_queue
    from omegaconf import OmegaConf

    from headrace.pipeline import group_sampler
    from headrace.transforms import GroupAssembler

    assembler = GroupAssembler(segment_key="segment")
    conf = {
        "controller": {"sampler": group_sampler(assembler), "polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
    }
    transfer_queue.init(OmegaConf.create(conf, flags={"allow_objects": True}))
    yield assembler
    transfer_queue.close()
