"""Makes stand-ins for the CUDA libraries that a CUDA build of torch is linked against and that are not installed.

The dynamic linker must find each library and each symbol by name, or torch does not load. A CPU engine then calls none
of them; should something do so all the same, every function answers cudaErrorNoDevice. Called by install.sh with the
site-packages folder; needs readelf and gcc.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# cudaErrorNoDevice.
ANSWER = 100
# What belongs to CUDA. The driver's libcuda.so is not among it: torch opens that one itself, when it finds it.
CUDA_LIBRARY = re.compile(r"lib(cu(?!da\.so)|nv|nccl)")
CUDA_SYMBOL = re.compile(r"(cu|nv|nccl|pnccl|_Z\w*nvshmem)")


class Imports:
    """What a set of shared objects wants from others, as their dynamic sections say it."""

    def __init__(self, objects: list[Path]):
        """Reads all of them."""
        self.libraries: set[str] = set()
        self.versioned: dict[str, set[tuple[str, str]]] = defaultdict(set)
        """By library: symbol and version. With a version, the object says which library it means."""
        self.unversioned: set[str] = set()
        """Symbols that may come from any library."""
        self._defined: set[str] = set()
        for path in objects:
            self._read(path)
        self.unversioned -= self._defined

    def _read(self, path: Path) -> None:
        self.libraries.update(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", path)))
        library_of_version = {}
        library = None
        for line in readelf("--version-info", path).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif library and (found := re.search(r"Name: (\S+)", line)):
                library_of_version[found[1]] = library
        for line in readelf("--dyn-syms", path).splitlines():
            # Num: Value Size Type Bind Vis Ndx Name[@Version]
            fields = line.split()
            if len(fields) < 8:
                continue
            name, _, version = fields[7].partition("@")
            version = version.lstrip("@")
            if fields[6] != "UND":
                self._defined.add(name)
            elif version in library_of_version:
                self.versioned[library_of_version[version]].add((name, version))
            elif CUDA_SYMBOL.match(name):
                self.unversioned.add(name)


def readelf(question: str, path: Path) -> str:
    """What readelf prints, with names in full."""
    command = ["readelf", "--wide", question, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def build(target: Path, versioned: set[tuple[str, str]], unversioned: set[str]) -> None:
    """Compiles one library in which all these names are the same tiny function."""
    names = sorted({name for name, _ in versioned} | unversioned)
    source = [".text"]
    for name in names:
        source += [f'.globl "{name}"', f'.type "{name}", @function', f'"{name}":']
    source += [f"mov ${ANSWER}, %eax", "ret", '.section .note.GNU-stack, "", @progbits', ""]
    of_version = defaultdict(list)
    for name, version in sorted(versioned):
        of_version[version].append(f'"{name}";')
    script = [f"{version} {{ global: {' '.join(members)} }};" for version, members in of_version.items()]
    with tempfile.TemporaryDirectory() as folder:
        assembly, versions = Path(folder, "stub.s"), Path(folder, "versions")
        assembly.write_text("\n".join(source))
        versions.write_text("\n".join(script))
        options = [f"-Wl,--version-script={versions}"] if script else []
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{target.name}", *options, "-o", target, assembly]
        subprocess.run(command, check=True)


def main(packages: Path) -> None:
    """Puts a stub for each missing library beside torch's own."""
    libraries = packages / "torch" / "lib"
    imports = Imports([*sorted(libraries.glob("*.so*")), *sorted((packages / "torch").glob("*.so"))])
    installed = {path.name for path in [*packages.glob("nvidia/**/*.so*"), *libraries.iterdir()]}
    missing = sorted(name for name in imports.libraries - installed if CUDA_LIBRARY.match(name))
    for position, name in enumerate(missing):
        # A symbol without a version is found wherever it is, so the first library has them all.
        build(libraries / name, imports.versioned[name], imports.unversioned if position == 0 else set())
    print(f"stubs for {len(missing)} CUDA libraries: {' '.join(missing)}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
