"""`python -m shoal` is the command `shoal`."""

from shoal.cli import app

if __name__ == "__main__":
    app(prog_name="shoal")
