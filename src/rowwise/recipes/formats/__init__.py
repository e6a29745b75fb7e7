"""Exports of a trained model to formats of others: ONNX, AOTInductor, MLflow, Triton, KServe. No run imports this."""
