"""``python -m deepseal`` is the same as ``deepseal``."""

from deepseal.apps.cli import main

if __name__ == "__main__":
    main()
