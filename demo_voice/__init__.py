"""The recipe of the demo checkpoint: a phrase book, spoken by free synthesisers, learned by a very small Fish Speech.

Serving, notebooks and tests need only what it wrote (model_store/demo/); flite, espeak-ng and training code stay here.
"""
