"""What a run says about itself: metrics, speed, the progress bar, the report.

Metrics have one name everywhere (JSONL, TensorBoard, W&B, log lines, report):

=========================  ===========  =====================================================
name                       unit         meaning
=========================  ===========  =====================================================
loss                       nats/token   training loss over the step's trained tokens, all weighted terms included
bits_per_byte              bits/byte    training loss per byte of text
val_loss                   nats/token   loss over the held-out tokens
val_bits_per_byte          bits/byte    the same per byte of held-out text
cross_entropy              nats/token   the loss without its further terms, where it has some
mtp                        nats/token   loss of predictions beyond the next token (mean over those of all depths)
val_mtp_acceptance         share        of these, at the first depth and on held-out text, those that are the model's own
                                        most likely token (what speculative decoding accepts); _2, ... at further depths
expert_load_max, _min      1            load of the busiest and of the idlest expert over the mean (averaged over layers)
expert_dropped             share        choices that found no place (`train.experts.path=capacity`)
router_entropy             nats         mean entropy of a router's probabilities
learning_rate              1            peak group's rate at this step
grad_norm                  1            global norm of the gradient before clipping
tokens_per_second          tokens/s     trained tokens (mask > 0), over all devices
padded_tokens_per_second   tokens/s     every place of the batch, over all devices
step_seconds               s            wall time of a step
data_wait                  share        share of the wall time spent waiting for a batch
mfu                        share        model FLOP/s over the devices' peak (see `throughput`)
seconds                    s            wall time since the run started
=========================  ===========  =====================================================

A metric that was not measured is absent.
"""
