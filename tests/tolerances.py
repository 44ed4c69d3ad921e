"""Largest absolute error allowed against the float64 oracle, by quantity and input type: the one table."""

TOLERANCES: dict[str, dict[str, float]] = {
    # Standard normal queries, keys and values. In float32 the worst is a long run of equal values, whose roundings all
    # go one way; in bfloat16 it is half a unit in the last place of an output up to 8.
    "tree_attention": {"float32": 5e-6, "bfloat16": 1.6e-2},
    # The same inputs; bfloat16 and float16 round the weights before they are multiplied in, too.
    "triton_attention": {"float32": 5e-6, "bfloat16": 2.4e-2, "float16": 3e-3},
    # Per |x|; in bfloat16 the rounding of the output.
    "activation": {"float32": 2e-7, "bfloat16": 4e-3, "float16": 5.2e-4},
    # Log-sum-exp and log-probabilities, in nats, of logits up to 30.
    "logsumexp": {"float32": 4e-6, "bfloat16": 4e-6},
    "logprob": {"float32": 8e-6, "bfloat16": 8e-6},
    # Log-probabilities, in nats, of logits up to 30 that are products of the head and stay in float32.
    "head": {"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
    # Against plain transformers, one unpadded prompt at a time, in nats for each token scored.
    "loglikelihood per token": {"float32": 1e-4},
    # Accuracies and variance components of answers 0 and 1, where answers are missing or queries weigh differently.
    "incomplete answers": {"float64": 1e-10},
    # What a run says on another processor than the fixture's: log-likelihoods of labels of a token or two, and what
    # follows from them; relative where it is more than 1.
    "behaviour": {"float32": 2e-4},
}
