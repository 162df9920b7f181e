"""The rig: a scripted fake backend, a raw-socket client and a gateway process, with waiting by condition."""
