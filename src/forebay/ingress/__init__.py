"""Adapters that turn a protocol into requests for the gateway, and its answers back."""
