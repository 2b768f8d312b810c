"""The hub: admission, rounds, store, ledger, Flower grid, `gym-server`."""
