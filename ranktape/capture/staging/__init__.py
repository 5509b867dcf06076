"""How does a tensor get from the training thread to the writer process?"""
