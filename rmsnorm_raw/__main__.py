"""`python -m rmsnorm_raw`: the command rmsnorm-raw where no script is installed. Knows nothing else."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
