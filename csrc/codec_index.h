/// From the index of a block or an element to where it lies: one source for host and device.
#pragma once

#include <cstdint>

#include "codec_math.h"

namespace offload::codec {

/// A strided tensor with neighbouring dimensions merged where one stride spans both.
struct StridedMap {
    std::int64_t row_length = 1;
    std::int64_t step = 1;  // from an element of a row to the next
    std::int64_t rows = 1;
    std::int64_t blocks_per_row = 1;
    int outer_dims = 0;
    std::int64_t shape[7] = {};  // of the dimensions that make up `rows`, outermost first
    std::int64_t stride[7] = {};

    OFFLOAD_HD std::int64_t elements() const { return rows * row_length; }
    OFFLOAD_HD std::int64_t blocks() const { return rows * blocks_per_row; }

    /// Where row `row` starts, in elements from the tensor's first.
    OFFLOAD_HD std::int64_t row_offset(std::int64_t row) const {
        std::int64_t offset = 0;
        for (int dim = outer_dims - 1; dim > 0; --dim) {
            const std::int64_t above = row / shape[dim];
            offset += (row - above * shape[dim]) * stride[dim];
            row = above;
        }
        return outer_dims > 0 ? offset + row * stride[0] : 0;
    }

    /// Where the element with row-major index `element` lies.
    OFFLOAD_HD std::int64_t element_offset(std::int64_t element) const {
        const std::int64_t row = rows == 1 ? 0 : element / row_length;
        return row_offset(row) + (element - row * row_length) * step;
    }
};

/// At most `kBlock` values of one row.
struct Block {
    std::int64_t index;  // also that of its scale
    std::int64_t row;
    std::int64_t column;      // of its first value
    std::int64_t row_source;  // where its row starts in the tensor

    OFFLOAD_HD std::int64_t source(const StridedMap& map) const {
        return row_source + column * map.step;
    }
    OFFLOAD_HD std::int64_t codes(const StridedMap& map) const {
        return row * map.row_length + column;
    }
    OFFLOAD_HD int count(const StridedMap& map) const {
        const std::int64_t left = map.row_length - column;
        return left < kBlock ? static_cast<int>(left) : kBlock;
    }
};

OFFLOAD_HD Block block_at(const StridedMap& map, std::int64_t index) {
    const std::int64_t row = map.rows == 1 ? 0 : index / map.blocks_per_row;
    const std::int64_t column = (index - row * map.blocks_per_row) * kBlock;
    return {index, row, column, map.row_offset(row)};
}

/// The block after `block`, without a division while it is in the same row.
OFFLOAD_HD Block next_block(const StridedMap& map, const Block& block) {
    const std::int64_t column = block.column + kBlock;
    if (column < map.row_length) {
        return {block.index + 1, block.row, column, block.row_source};
    }
    return {block.index + 1, block.row + 1, 0, map.row_offset(block.row + 1)};
}

}  // namespace offload::codec
