"""From a run folder to a Hub repository and back.

Nothing is imported here: a process that imports `modeling_vit_scratch` registers its classes with transformers, and
those would then win over the code that a repository carries.
"""
