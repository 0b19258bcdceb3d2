"""`python -m offload`, the same as the command `offload`."""

from offload.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
