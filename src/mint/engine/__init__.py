"""The arithmetic: token ids and tensors in, logprobs, gradients and samples out. Knows no text, HTTP, tenant or job."""
