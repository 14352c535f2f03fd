"""The operations of GPT-2, one file each: `<op>_forward` and its hand-derived `<op>_backward` side by side.

Every backward takes the gradient of the loss with respect to the operation's output (`d` + name) and what the forward
saved, and returns the gradients of the inputs. Statistics and sums are taken in at least float32, so that the same code
is exact in float64. Nothing here knows the model, the optimizer or the GPU.

    B batch, T sequence length, C channels, NH heads, HS head size, V vocabulary, Vp padded vocabulary
"""
