"""Real peers, installed on the spot: slow and large, so `make test-peers` runs them and `make test` does not."""
