"""What arrives and when: arrival processes, sizes, traces, clients. Pure: no clock, no socket, chance from seeds."""
