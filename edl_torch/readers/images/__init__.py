"""Folders, CSV lists, COCO and VOC: images with what is known of them."""
