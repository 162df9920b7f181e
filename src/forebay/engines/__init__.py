"""Engines: clients of foreign inference servers, and the two engines that Forebay brings along."""
