"""Field faults: public failure reports of other gateways, restated as black-box checks on `forebay serve`."""
