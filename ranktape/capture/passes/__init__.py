"""Which pass, microbatch, call and iteration is the training in?"""
