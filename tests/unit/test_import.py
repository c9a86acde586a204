"""Importing the library is quick and brings no torch."""

import subprocess
import sys

TIMED_IMPORT = """
import sys, time
begin = time.perf_counter()
import shoal
print(time.perf_counter() - begin)
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert shoal.ShoalError and "torch" not in sys.modules
"""


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_import_takes_under_a_fifth_of_a_second_and_loads_no_torch():
    assert min(float(python("-c", TIMED_IMPORT)) for _ in range(3)) < 0.2


def test_the_commands_help_loads_no_torch():
    program = "import sys, shoal.cli\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    python("-c", program)
    assert "make-checkpoint" in python("-m", "shoal", "--help")


def test_unknown_names_are_attribute_errors():
    python(
        "-c", "import shoal\ntry: shoal.nothing\nexcept AttributeError as e: assert 'nothing' in str(e)\nelse: raise 1"
    )
