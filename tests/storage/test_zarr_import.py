"""Does plain zarr know our data types in a fresh interpreter, whichever of the two was imported first?"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zarr
import zarr.storage

from tests.storage.test_zarr_types import KEEP_ALL, every_pattern


def run(code: str, *options: str, place: Path) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter does with the code; `place` is its `sys.argv[1]`, and it must leave in good order."""
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code), str(place)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A group with one array of bfloat16."""
    place = tmp_path / "group"
    zarr.create_group(place).create_array("a", data=every_pattern("bfloat16"), config=KEEP_ALL)
    return place


CHECK = """
import sys
group = zarr.open_group(sys.argv[1], mode="r")
print(group["a"].dtype.name, int(group["a"][...].view("u2").sum()))
assert "torch" not in sys.modules
"""


ORDERS = {
    "ours first": "import ranktape.storage\nassert 'zarr' not in sys.modules\nimport zarr",
    "zarr first": "import zarr\nimport ranktape.storage",
    "zarr's parts": "import ranktape.storage\nimport zarr.core.group\nimport zarr",
    "from": "import ranktape.storage\nfrom zarr import open_group\nimport zarr",
    "our classes": "import ranktape.storage.format.zarr_floats\nimport zarr",
    "a module of ours": "import ranktape.storage.places.zarr_store\nimport zarr",
    "looked for": "import ranktape.storage, importlib.util\nassert importlib.util.find_spec('zarr')\nimport zarr",
    "xarray": "import ranktape.storage\ntry:\n import xarray\nexcept ImportError: pass\nimport zarr",
}


@pytest.mark.parametrize("order", ORDERS)
def test_plain_zarr_opens_our_types_in_any_order(order: str, stored: Path) -> None:
    done = run(f"import sys\n{ORDERS[order]}\n{CHECK}", "-W", "error", place=stored)
    expected = int(every_pattern("bfloat16").view("u2").sum())
    assert done.stdout == f"bfloat16 {expected}\n"
    assert done.stderr == ""


def test_waiting_leaves_no_trace(tmp_path: Path) -> None:
    done = run(
        """
        import sys, importlib.resources, inspect
        before = list(sys.meta_path)
        import ranktape.storage
        from ranktape.storage.format.zarr_types import register_on_import
        register_on_import()
        assert len(sys.meta_path) == len(before) + 1, sys.meta_path
        import zarr
        assert sys.meta_path == before, sys.meta_path
        loader = type(zarr.__loader__).__name__
        assert loader == type(zarr.__spec__.loader).__name__ == "SourceFileLoader", loader
        assert importlib.resources.files("zarr").joinpath("__init__.py").is_file()
        assert "open_group" in inspect.getsource(zarr)
        """,
        place=tmp_path,
    )
    assert done.stderr == ""


def test_many_threads_may_import_at_once(stored: Path) -> None:
    code = """
        import sys, threading
        gate = threading.Barrier(12)
        failures = []
        def ours():
            gate.wait()
            import ranktape.storage
            from ranktape.storage.format.zarr_types import register_on_import
            register_on_import()
        def theirs():
            gate.wait()
            import zarr
        def guarded(work):
            try: work()
            except BaseException as error: failures.append(error)
        threads = [threading.Thread(target=guarded, args=(work,)) for work in [ours, theirs] * 6]
        for thread in threads: thread.start()
        for thread in threads: thread.join(60)
        assert not failures, failures
        import zarr
        assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_AwaitZarr"]
        assert zarr.open_group(sys.argv[1], mode="r")["a"].dtype.name == "bfloat16"
        """
    for _ in range(3):
        assert run(code, "-W", "error", place=stored).stderr == ""


@pytest.mark.parametrize("order", ["import ranktape.storage, zarr", "import zarr, ranktape.storage"])
@pytest.mark.parametrize("options", [(), ("-W", "error")])
def test_our_own_failure_is_reported_and_zarr_goes_on(order: str, options: tuple[str, ...], tmp_path: Path) -> None:
    # Not a mock of our code: ml_dtypes is missing, as in a broken installation.
    code = f"import sys\nsys.modules['ml_dtypes'] = None\n{order}\nzarr.open_group(sys.argv[1], mode='w')"
    done = run(code, *options, place=tmp_path)
    assert "ranktape could not register its data types with zarr (ModuleNotFoundError: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_zarr_is_as_broken_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "__init__.py").write_text("raise OSError('no such wheel')")
    done = run(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import ranktape.storage
        for attempt in range(2):
            try:
                import zarr
            except OSError as error:
                print(error)
        """,
        "-W",
        "error",
        place=tmp_path,
    )
    assert done.stdout == "no such wheel\n" * 2


def test_without_zarr_the_import_error_is_the_usual_one(tmp_path: Path) -> None:
    done = run(
        """
        import sys
        from ranktape.storage.format.zarr_types import register_on_import
        register_on_import()
        sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
        sys.path_importer_cache.clear()
        try:
            import zarr
        except ModuleNotFoundError as error:
            print(error)
        """,
        place=tmp_path,
    )
    assert done.stdout == "No module named 'zarr'\n"


def test_waiting_is_light(tmp_path: Path) -> None:
    code = """
        import sys
        from ranktape.storage.format.zarr_types import register_on_import
        register_on_import()
        print(sorted({"numpy", "ml_dtypes", "zarr", "torch", "asyncio"} & set(sys.modules)))
        """
    assert run(code, place=tmp_path).stdout == "[]\n"
