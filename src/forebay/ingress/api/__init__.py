"""What the admin port offers beyond metrics: a table of endpoints, each with the types that decode and describe it."""
