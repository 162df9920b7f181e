"""A simulated world around the production pipeline: engines, gateways, clients, faults, on one event heap."""
