/// What one thread of a card does: a lane of a warp takes four of a block's 128 values, or one
/// thread takes eight bools. Host code as well, so that a test without a card can run all lanes in
/// turn.
#pragma once

#include <cstdint>
#include <cstring>

#include "codec_index.h"
#include "codec_math.h"

namespace offload::codec {

constexpr int kLanes = 32;
constexpr int kLaneValues = kBlock / kLanes;

/// Moved in one access of 4, 8 or 16 bytes where memory allows it.
template <typename Element>
struct alignas(kLaneValues * sizeof(Element)) LaneOf {
    Element values[kLaneValues];
};

template <typename Wide>
OFFLOAD_HD bool is_aligned(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % alignof(Wide) == 0;
}

/// Loads the lane's values from `from` on, `step` apart; the `count` of them that exist may be any
/// number, also negative, and the others are 0.
template <typename Element>
OFFLOAD_HD LaneOf<Element> load_lane(const Element* from, std::int64_t step, int count) {
    using Lane = LaneOf<Element>;
    Lane lane = {};
    if (step == 1 && count >= kLaneValues && is_aligned<Lane>(from)) {
        return *reinterpret_cast<const Lane*>(from);
    }
    for (int i = 0; i < kLaneValues; ++i) {
        if (i < count) {
            lane.values[i] = from[i * step];
        }
    }
    return lane;
}

template <typename Element>
OFFLOAD_HD void store_lane(const LaneOf<Element>& lane, Element* to, std::int64_t step, int count) {
    using Lane = LaneOf<Element>;
    if (step == 1 && count >= kLaneValues && is_aligned<Lane>(to)) {
        *reinterpret_cast<Lane*>(to) = lane;
        return;
    }
    for (int i = 0; i < kLaneValues; ++i) {
        if (i < count) {
            to[i * step] = lane.values[i];
        }
    }
}

/// The largest finite magnitude, as bits that order like it in all lanes.
template <typename Type>
OFFLOAD_HD std::int32_t largest_of_lane(const LaneOf<typename Type::Word>& lane) {
    std::int32_t largest = 0;
    for (int i = 0; i < kLaneValues; ++i) {
        largest = larger(largest, finite_magnitude<Type>(lane.values[i]));
    }
    return largest;
}

/// The scale of a block from the largest of its lanes.
template <typename Code, typename Type>
OFFLOAD_HD BlockScale scale_of(std::int32_t largest) {
    return block_scale(Type::widen(static_cast<typename Type::Word>(largest)), Code::kLimit);
}

template <typename Code, typename Type, bool kRandom>
OFFLOAD_HD LaneOf<std::uint8_t> encode_lane(const LaneOf<typename Type::Word>& words, int lane,
                                            float inverse, std::uint64_t key) {
    LaneOf<std::uint8_t> codes = {};
    for (int i = 0; i < kLaneValues; ++i) {
        const float uniform = kRandom ? random_uniform(key, lane * kLaneValues + i) : 0;
        codes.values[i] = Code::template encode<Type, kRandom>(words.values[i], inverse, uniform);
    }
    return codes;
}

template <typename Code, typename Type>
OFFLOAD_HD LaneOf<typename Type::Word> decode_lane(const LaneOf<std::uint8_t>& codes, float scale) {
    LaneOf<typename Type::Word> words = {};
    for (int i = 0; i < kLaneValues; ++i) {
        words.values[i] = Type::narrow(Code::decode(codes.values[i], scale));
    }
    return words;
}

struct alignas(8) EightBools {
    std::uint8_t values[8];
};

/// How many of the eight bools of byte `index` exist.
OFFLOAD_HD int bools_of(const StridedMap& map, std::int64_t index) {
    const std::int64_t left = map.elements() - 8 * index;
    return left < 8 ? static_cast<int>(left) : 8;
}

OFFLOAD_HD bool is_dense(const StridedMap& map) { return map.rows == 1 && map.step == 1; }

/// The bools of byte `index` of the packed bits, a byte each; those that do not exist are 0.
OFFLOAD_HD std::uint64_t load_bools(const StridedMap& map, const std::uint8_t* source,
                                    std::int64_t index) {
    const int count = bools_of(map, index);
    std::uint64_t bools = 0;
    if (count == 8 && is_dense(map) && is_aligned<EightBools>(source)) {
        const EightBools together = reinterpret_cast<const EightBools*>(source)[index];
        memcpy(&bools, &together, sizeof(bools));
        return bools;
    }
    for (int i = 0; i < count; ++i) {
        const std::uint64_t value = source[map.element_offset(8 * index + i)];
        bools |= value << (8 * i);
    }
    return bools;
}

OFFLOAD_HD void store_bools(const StridedMap& map, std::uint64_t bools, std::uint8_t* destination,
                            std::int64_t index) {
    const int count = bools_of(map, index);
    if (count == 8 && is_dense(map) && is_aligned<EightBools>(destination)) {
        EightBools together = {};
        memcpy(&together, &bools, sizeof(together));
        reinterpret_cast<EightBools*>(destination)[index] = together;
        return;
    }
    for (int i = 0; i < count; ++i) {
        destination[map.element_offset(8 * index + i)] =
            static_cast<std::uint8_t>(bools >> (8 * i));
    }
}

}  // namespace offload::codec
