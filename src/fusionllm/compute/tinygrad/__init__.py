"""The tinygrad backend: the operators of GPT-2, Llama and Qwen3, and the example of how to add a backend.

Needs the extra ``tinygrad``. `operators` is the table of what each operator means, `backend` all the rest.
"""
