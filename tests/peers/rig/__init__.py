"""The rig of the peer tests: the installer and the process of a real vLLM."""
