"""Is it worth letting in? Size, demand, depth, predicted wait, warm-up and drain; and when to come back."""
