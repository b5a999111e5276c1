"""What is installed is whole: every module and data file is in the wheel, and the wheel alone compiles and runs a model."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = ("compiler", "passes", "backends", "runtime", "models")
DATA = (".h", ".toml", ".json", ".cpp", ".jinja", ".html", ".css", ".js", ".txt", ".md")


def modules() -> set[Path]:
    """Every module of the package, from the root."""
    return {Path("__init__.py"), *(f.relative_to(ROOT) for folder in FOLDERS for f in (ROOT / folder).rglob("*.py"))}


def data() -> set[Path]:
    """Every file of the package that is no module."""
    return {f.relative_to(ROOT) for folder in FOLDERS for f in (ROOT / folder).rglob("*") if f.suffix in DATA}


def test_every_folder_with_modules_is_a_package():
    found = {".".join(("infc", *module.parent.parts)) for module in modules()}
    assert found == set(PROJECT["packages"])


def test_every_package_has_an_init():
    missing = [m.parent for m in modules() if not (ROOT / m.parent / "__init__.py").exists()]
    assert not missing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no build folder appears here."""
    folder = tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.infc")
    shutil.copytree(ROOT, folder / "source", ignore=skipped)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--wheel-dir",
            folder,
            folder / "source",
        ],
        check=True,
        timeout=120,
    )
    return next(folder.glob("infc-*.whl"))


def test_the_wheel_holds_every_module_and_data_file(wheel: Path):
    inside = {Path(name).relative_to("infc") for name in zipfile.ZipFile(wheel).namelist() if name.startswith("infc/")}
    assert inside == modules() | data()


def test_the_wheel_alone_compiles_and_runs(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel], check=True, timeout=120
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def python(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert Path(python("import infc; print(infc.__file__)").strip()) == site / "infc" / "__init__.py"
    python("import sys; from infc.compiler.cli import main; sys.exit(main(['compile', 'tiny', '-o', 'tiny.infc', '--quiet']))")
    print(python("import infc; print(infc.load('tiny.infc').generate(['hello'], max_tokens=3)[0].token_ids)"))
