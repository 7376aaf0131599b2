"""Does a file compute what PyTorch computes, where do they part, and how is it shown to others?

Empty of imports: ``certificates`` and ``judgement`` work where PyTorch is not installed.
"""
