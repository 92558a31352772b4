"""Write constraints.txt: one set of versions of all that the extras and the sessions install.

Usage: python tools/constraints.py PYTHON PYTHON, with interpreters of Python 3.10 and of a later
version.  Pins stay: pip chooses the versions of what is new, and of lines that were deleted before.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parents[1] / "constraints.txt"
#: By marker, what is resolved: for later versions what all sessions ask for.
ASKED = {
    '< "3.11"': "-e .[all,dev]",
    '>= "3.11"': "-e .[all,dev,docs] build check-wheel-contents deptry pip-audit pip-licenses "
    "twine ninja setuptools wheel einops triton flask flask-compress "
    "fla-core flash-linear-attention xlstm",
}
LINE = re.compile(r"^([\w.-]+)==([^;\s]+)(?:; python_version (.+))?$", re.MULTILINE)

held, sets, names = LINE.findall(FILE.read_text()), list[dict[str, str]](), dict[str, str]()
for python, (marker, asked) in zip(sys.argv[1:], ASKED.items(), strict=True):
    command = [python, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
    command += ["--report", "-", "-c", str(FILE), *asked.split()]
    report = subprocess.run(command, cwd=FILE.parent, check=True, stdout=subprocess.PIPE).stdout
    found = [x["metadata"] for x in json.loads(report)["install"]]
    pins = [(name, version) for name, version, of in held if of in ("", marker)]
    # which packages of CUDA there are depends on the build of torch
    own = [x for x in found if not re.match("captum_ssm|nvidia-|cuda-", x["name"])]
    pins += [(x["name"], x["version"].partition("+")[0]) for x in own]
    plain = [(re.sub("[-_.]+", "-", name).lower(), name, version) for name, version in pins]
    names = {key: name for key, name, _ in plain} | names
    sets.append({key: version for key, _, version in plain})
lines = ["# One tested set of versions, for Python 3.10 to 3.13, by tools/constraints.py.", ""]
for key in sorted(names):
    versions = [pins.get(key) for pins in sets]
    each = zip(versions, ASKED, strict=True) if len(set(versions)) > 1 else [(versions[0], "")]
    for version, marker in each:
        where = f"; python_version {marker}" if marker else ""
        lines += [f"{names[key]}=={version}{where}"] if version else []
FILE.write_text("\n".join(lines) + "\n")
