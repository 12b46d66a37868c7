"""The Django project and the data plane: OpenAI surface, admission, dispatch, metering, management API.

Of the engine it must know only `engine.protocol` and `engine.text`; it needs no model files and no torch.
"""
