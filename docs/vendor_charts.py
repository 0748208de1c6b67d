"""Bring the chart library of the page into the repository: `make page`. Needs npm.

    python docs/vendor_charts.py [VERSION]

npm downloads exactly the version that vendored.json names, and its hash must be the recorded one. A
VERSION is for an upgrade: it is recorded in place of the old one. A clone needs no npm, because the
files are committed; tests/test_view_page.py compares them with the record.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "verifiers_rl/view/static/vendor"
RECORD = FOLDER / "vendored.json"
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "LICENSE",
}


def main() -> None:
    record = json.loads(RECORD.read_text())
    version = sys.argv[1] if len(sys.argv) > 1 else record["version"]
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--json", f"{record['package']}@{version}"]
        done = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, timeout=300, text=True
        )
        (packed,) = json.loads(done.stdout)
        if len(sys.argv) == 1 and packed["integrity"] != record["integrity"]:
            sys.exit(f"{packed['id']}: npm has {packed['integrity']}, not {record['integrity']}")
        with tarfile.open(Path(folder) / packed["filename"]) as archive:
            for inside, name in FILES.items():
                member = archive.extractfile(inside)
                assert member is not None, inside
                (FOLDER / name).write_bytes(member.read())
    hashes = {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
              for name in FILES.values()}  # fmt: skip
    record |= {"version": version, "integrity": packed["integrity"], "sha256": hashes}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{packed['id']}: {', '.join(FILES.values())}")


if __name__ == "__main__":
    main()
