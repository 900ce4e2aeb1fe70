"""Headless Chromium from the npm registry: downloaded once, checked against its hash, and unpacked into a cache folder.

python packages/basics/tests_in_browser/chromium.py FOLDER

The npm package @sparticuz/chromium holds a build without a window system, compressed by brotli, with the libraries and
a font that it needs. Downloads with npm and unpacks with node, so both must be installed. The build has no --dump-dom
and no --screenshot; the tests use the DevTools protocol.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "147.0.0"  # of the npm package; contains Chromium 147.0.7727.0
SHA512 = (
    "e1929e01041af2ea769adebbe6a4a2b73b4b75b42b95ff0129d0b99da79aa7ee"
    "4cbf5395d4e94974fa14f84242fe9e6c414254426378afeab9f8485a68e507a5"
)
UNPACK = """
const fs = require("fs"), zlib = require("zlib");
const [from, to] = process.argv.slice(-2);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)), { mode: 0o755 });
"""

# The package's own fonts.conf names folders of another system.
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">gangline-browser-fonts</cachedir></fontconfig>
"""


def fetch(cache: Path) -> Path:
    """Return the folder of the browser, which is downloaded if it is missing. Raises RuntimeError with the reason."""
    target = cache / f"chromium-{VERSION}"
    if target.exists():
        return target
    for program in ("npm", "node"):
        if shutil.which(program) is None:
            raise RuntimeError(f"the browser needs {program}:  apt-get install nodejs npm")
    new = cache / f".chromium-{VERSION}.{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    package = f"@sparticuz/chromium@{VERSION}"
    subprocess.run(["npm", "pack", "--silent", "--ignore-scripts", package], cwd=new, check=True, stdout=sys.stderr)
    (archive,) = new.glob("*.tgz")
    if hashlib.sha512(archive.read_bytes()).hexdigest() != SHA512:
        raise RuntimeError(f"{archive} has another SHA-512 than version {VERSION} of {package}")
    with tarfile.open(archive) as packed:
        packed.extractall(new, filter="data")
    for name in ("chromium", "al2023.tar", "fonts.tar", "swiftshader.tar"):
        source = new / "package" / "bin" / f"{name}.br"
        subprocess.run(["node", "-e", UNPACK, str(source), str(new / name)], check=True)
        if name.endswith(".tar"):
            with tarfile.open(new / name) as packed:
                packed.extractall(new, filter="data")
            (new / name).unlink()
    (new / "fonts.conf").write_text(FONTS)
    shutil.rmtree(new / "package")
    archive.unlink()
    new.rename(target)
    return target


def make_environment(folder: Path) -> dict[str, str]:
    """Return the variables with which the browser finds its libraries and its font."""
    return {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_PATH": str(folder)}


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
