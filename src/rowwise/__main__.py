"""`python -m rowwise` is `rowwise`; under torchrun, `-m rowwise`."""

from rowwise.cli.main import main

if __name__ == "__main__":
    main()
