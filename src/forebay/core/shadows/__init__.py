"""Settings in shadow: what they would have said of a request, asked beside the acting verdict, which they never change.

`shadow` says what one is, and what it is asked with; `questions` has them, a file each; `moments` is where the pipeline
asks; `reload` puts them in, takes them out and lets them act. What an acting setting shares with the one in its shadow,
so that both are told the same, is in the room that it belongs to: `limits.pair`, `tuning.pair`, `admission.pairs`.
"""
