"""How a program of the kernels goes through its sample sets, and what it keeps of them.

A program computes a block of sample sets, or a part of each. It goes through them in steps of 4·width elements, width
of each quarter of a tile, because a counter of the noise gives four numbers, for elements a quarter apart.

Three tuples are passed on. ``where`` is what a program computes, and ``strides`` where that is in memory. ``tile`` has
the constants; their places are named below.
"""

import triton
import triton.language as tl

from nnorm_export.layers.fused import settings
from nnorm_export.layers.fused.triton_kernels.mathematics import noise

# The rows of the statistics.
MEAN = tl.constexpr(settings.MEAN)
INVERSE = tl.constexpr(settings.INVERSE)
CORRECTION = tl.constexpr(settings.CORRECTION)
EXACT_MEAN = tl.constexpr(settings.EXACT_MEAN)
VARIANCE = tl.constexpr(settings.VARIANCE)
LMBDA = tl.constexpr(settings.LMBDA)
DEVIATION = tl.constexpr(settings.DEVIATION)
BY_H_D = tl.constexpr(settings.BY_H_D)
BY_SIGNED_LOG = tl.constexpr(settings.BY_SIGNED_LOG)
BY_CURVATURE = tl.constexpr(settings.BY_CURVATURE)
BY_D = tl.constexpr(settings.BY_D)

TILE, QUARTER = tl.constexpr(settings.TILE), tl.constexpr(settings.QUARTER)
# The places in `tile`.
SETS, WIDTH, STEPS, QUARTERS, IS_ONE_SEGMENT, REAL, OFFSET = (tl.constexpr(place) for place in range(7))


@triton.jit
def where_of_program(all_sets, length, tiles, tile: tl.constexpr):
    """The numbers of the sample sets of this program, [sets, 1], which of them exist, and the steps of its part."""
    sets: tl.constexpr = tile[SETS]
    steps: tl.constexpr = tile[STEPS]
    offset: tl.constexpr = tile[OFFSET]
    number = (tl.arange(0, sets).to(offset) + tl.cast(tl.program_id(0), offset) * sets)[:, None]
    first = tl.program_id(1) * tiles
    end = tl.minimum(first + tiles, tl.cdiv(length, TILE))
    return number, number < all_sets, first * steps, end * steps, length


@triton.jit
def elements_of_step(step, quarter: tl.constexpr, where, strides, tile: tl.constexpr):
    """The positions of a quarter of a step in their sets, their places in the tensor, and which of them exist."""
    width: tl.constexpr = tile[WIDTH]
    steps: tl.constexpr = tile[STEPS]
    is_one_segment: tl.constexpr = tile[IS_ONE_SEGMENT]
    offset: tl.constexpr = tile[OFFSET]
    number, exists, length = where[0], where[1], where[4]
    extent, set_stride, segment_stride, element_stride = strides
    # The tensor first: a constant before it would become the result's type in Triton's interpreter.
    position = tl.arange(0, width).to(offset) + tl.cast(step // steps, offset) * TILE
    position = (position + quarter * QUARTER + step % steps * width)[None, :]
    if is_one_segment:
        place = number * set_stride + position * element_stride
    else:
        place = number * set_stride + position // extent * segment_stride + position % extent * element_stride
    return position, place, exists & (position < length)


@triton.jit
def read(tensor, place, inside, tile: tl.constexpr):
    real: tl.constexpr = tile[REAL]
    return tl.load(tensor + place, mask=inside, other=0.0).to(real)


@triton.jit
def nothing(tile: tl.constexpr):
    """Zeros for the sums of the elements of a step: they are added up at the end."""
    sets: tl.constexpr = tile[SETS]
    width: tl.constexpr = tile[WIDTH]
    real: tl.constexpr = tile[REAL]
    return tl.zeros([sets, width], real)


@triton.jit
def as_number(value, real: tl.constexpr):
    """An argument in the kernel's arithmetic."""
    return tl.full([1, 1], value, real)


@triton.jit
def sum_of(terms):
    return tl.sum(terms, 1, keep_dims=True)


@triton.jit
def noise_of_step(step, seed, number, tile: tl.constexpr):
    width: tl.constexpr = tile[WIDTH]
    steps: tl.constexpr = tile[STEPS]
    return noise(seed, number, (tl.arange(0, width) + step // steps * QUARTER + step % steps * width)[None, :])


@triton.jit
def read_parameter(tensor, position, inside, where, period, run, one_weight: tl.constexpr, tile: tl.constexpr):
    """The weights or biases of elements; [sets, 1] where a set has one."""
    number, exists, length = where[0], where[1], where[4]
    if one_weight:
        return read(tensor, number % period, exists, tile)
    else:
        return read(tensor, number % period * (length // run) + position // run, inside, tile)


@triton.jit
def store_partial(partials, row: tl.constexpr, where, all_sets, of_part):
    number, exists = where[0], where[1]
    place = (tl.num_programs(1) * row + tl.program_id(1)) * tl.cast(all_sets, tl.int64) + number
    tl.store(partials + place, of_part, mask=exists)


@triton.jit
def load_partials(partials, row: tl.constexpr, where, all_sets, parts: tl.constexpr):
    """[sets, parts]."""
    number, exists = where[0], where[1]
    place = (tl.arange(0, parts)[None, :] + row * parts) * tl.cast(all_sets, tl.int64) + number
    return tl.load(partials + place, mask=exists, other=0.0)


@triton.jit
def store_statistic(statistics, row: tl.constexpr, where, all_sets, value):
    """A statistic of each set: all parts compute the same, and the first one stores it."""
    number, exists = where[0], where[1]
    tl.store(statistics + tl.cast(all_sets, tl.int64) * row + number, value, mask=exists & (tl.program_id(1) == 0))


@triton.jit
def load_statistic(statistics, row: tl.constexpr, where, all_sets):
    number, exists = where[0], where[1]
    return tl.load(statistics + tl.cast(all_sets, tl.int64) * row + number, mask=exists, other=0.0)


@triton.jit
def standardize(x, mean, inverse, correction):
    return (x - mean) * inverse + correction
