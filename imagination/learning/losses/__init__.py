"""What the optimisers minimise: pure functions of tensors, by what they act on.

Three rules hold for every loss here:

* A token counts by its weight; weight 0 means that the token is not there. Whatever its inputs hold (NaN, inf, the
  log-prob of a forced token), they change nothing and get a gradient of exactly zero. Inputs are replaced *before* the
  nonlinearities, because ``0 * nan`` is ``nan``, in the backward pass too.
* The weighted sum is divided by ``denominator``, the weight of the *global* batch that the caller counted once per
  optimiser step (over all micro-batches and ranks). So padding, packing and micro-batch splits leave the gradient as it
  is, and the gradients of micro-batches are added, never averaged.
* Metrics are sums over tokens, so that micro-batches can be added before anyone divides: see ``LossTerms``.

A sequence mean or a constant length is a choice of weights: ``token_weights``. Settings are the parts of
``imagination.settings.algorithm_parts``, which check their ranges; a loss that has a coefficient is multiplied by it.

Everything is computed in fp32 at least. Tensors are of one shape: ``[batch, time]`` at the token's own position (the
logits that predict token ``t`` are those of position ``t - 1``, and the caller shifts them) or ``[n]`` for the tokens
that the caller has picked. ``logprobs`` are nats of the policy that is trained, at the temperature of sampling
(``token_logprobs``), or ratios of an unchanged policy are not 1; all other arguments are constants. Every loss raises
``ValueError`` where shapes disagree, ``denominator`` is not positive, or a number is outside its range.
"""
