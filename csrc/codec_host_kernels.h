/// The host's loops over one block. Each is inlined into a function that is compiled for several
/// instruction sets; a test asks the compiler whether the marked ones were vectorised.
///
/// A loop narrows from 32-bit lanes to bytes in a statement of its own over a small buffer, since
/// GCC otherwise narrows every operand of the last addition instead of its result.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec_math.h"

namespace offload::codec {

/// Two neighbouring bfloat16 or two neighbouring codes, at any address.
struct __attribute__((packed, may_alias)) WordPair {
    std::uint32_t value;
};
struct __attribute__((packed, may_alias)) CodePair {
    std::uint16_t value;
};

OFFLOAD_HD float low_half(std::uint32_t pair) {
    return from_bits(static_cast<std::int32_t>(pair << 16));
}
OFFLOAD_HD float high_half(std::uint32_t pair) {
    return from_bits(static_cast<std::int32_t>(pair & 0xffff0000u));
}

OFFLOAD_HD std::uint32_t encode_finite_pair(Fp8, std::uint32_t pair, float inverse) {
    const std::int32_t low = to_bits(low_half(pair) * inverse) & kMagnitudeMask;
    const std::int32_t high = to_bits(high_half(pair) * inverse) & kMagnitudeMask;
    const std::uint32_t signs = ((pair >> 8) & 0x0080u) | ((pair >> 16) & 0x8000u);
    return (Fp8::nearest_shifted(low) >> Fp8::kShift) |
           (Fp8::nearest_shifted(high) >> (Fp8::kShift - 8)) | signs;
}

OFFLOAD_HD std::uint32_t encode_finite_pair(Int8, std::uint32_t pair, float inverse) {
    const auto low = static_cast<std::uint32_t>(Int8::encode_finite(low_half(pair), inverse));
    const auto high = static_cast<std::uint32_t>(Int8::encode_finite(high_half(pair), inverse));
    return (low & 0xffu) | (high << 8);
}

/// `encode_block` for an even number of finite bfloat16: no lane is ever widened or shuffled.
template <typename Code>
OFFLOAD_HD void encode_finite_pairs(const std::uint16_t* words, int count, float inverse,
                                    std::uint8_t* codes) {
    const auto* __restrict from = reinterpret_cast<const WordPair*>(words);
    auto* __restrict to = reinterpret_cast<CodePair*>(codes);
    for (int i = 0; i < count / 2; ++i) {  // vectorised
        to[i].value =
            static_cast<std::uint16_t>(encode_finite_pair(Code{}, from[i].value, inverse));
    }
}

template <typename Code, typename Type>
OFFLOAD_HD void encode_finite(const typename Type::Word* __restrict words, int count, float inverse,
                              std::uint8_t* __restrict codes) {
    std::int32_t wide[kBlock];
    for (int i = 0; i < count; ++i) {  // vectorised
        wide[i] = Code::encode_finite(Type::widen(words[i]), inverse);
    }
    for (int i = 0; i < count; ++i) {  // vectorised
        codes[i] = static_cast<std::uint8_t>(wide[i]);
    }
}

template <typename Code, typename Type, bool kRandom>
OFFLOAD_HD void encode_any(const typename Type::Word* __restrict words, int count, float inverse,
                           std::uint64_t key, std::uint8_t* __restrict codes) {
    for (int i = 0; i < count; ++i) {  // vectorised
        const float uniform = kRandom ? random_uniform(key, i) : 0;
        codes[i] = Code::template encode<Type, kRandom>(words[i], inverse, uniform);
    }
}

template <typename Type>
OFFLOAD_HD float largest_finite(const typename Type::Word* words, int count) {
    typename Type::Signed largest = 0;
    for (int i = 0; i < count; ++i) {  // vectorised
        const auto magnitude = finite_magnitude<Type>(words[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return Type::widen(static_cast<typename Type::Word>(largest));
}

/// Encodes the `count` values at `words`; returns their scale. Blocks without Inf and NaN, nearly
/// all, take a shorter way to the same codes.
template <typename Code, typename Type, bool kRandom>
OFFLOAD_HD float encode_block(const typename Type::Word* words, int count, std::uint64_t key,
                              std::uint8_t* codes) {
    using Signed = typename Type::Signed;
    Signed largest = 0;
    for (int i = 0; i < count; ++i) {  // vectorised
        const Signed magnitude = static_cast<Signed>(words[i] & Type::kMagnitude);
        largest = magnitude > largest ? magnitude : largest;
    }
    if (kRandom || largest >= Type::kInfinity) {
        const BlockScale scale = block_scale(largest_finite<Type>(words, count), Code::kLimit);
        encode_any<Code, Type, kRandom>(words, count, scale.inverse, key, codes);
        return scale.scale;
    }
    const float amax = Type::widen(static_cast<typename Type::Word>(largest));
    const BlockScale scale = block_scale(amax, Code::kLimit);
    if constexpr (std::is_same_v<Type, BFloat16>) {
        if (count % 2 == 0) {
            encode_finite_pairs<Code>(words, count, scale.inverse, codes);
            return scale.scale;
        }
    }
    encode_finite<Code, Type>(words, count, scale.inverse, codes);
    return scale.scale;
}

template <typename Code, typename Type>
OFFLOAD_HD void decode_any(const std::uint8_t* __restrict codes, int count, float scale,
                           typename Type::Word* __restrict words) {
    float wide[kBlock];
    for (int i = 0; i < count; ++i) {  // vectorised
        wide[i] = Code::decode(codes[i], scale);
    }
    for (int i = 0; i < count; ++i) {  // vectorised
        words[i] = Type::narrow(wide[i]);
    }
}

/// int8 without NaN to an even number of bfloat16. The rounded high half keeps its place, so
/// nothing is packed.
OFFLOAD_HD void decode_int8_pairs(const std::uint8_t* codes, int count, float scale,
                                  std::uint16_t* words) {
    const auto* __restrict from = reinterpret_cast<const CodePair*>(codes);
    auto* __restrict to = reinterpret_cast<WordPair*>(words);
    for (int i = 0; i < count / 2; ++i) {  // vectorised
        const std::uint32_t pair = from[i].value;
        const float low = static_cast<float>(static_cast<std::int32_t>(pair << 24) >> 24);
        const float high = static_cast<float>(static_cast<std::int32_t>(pair << 16) >> 24);
        to[i].value = (BFloat16::rounded(low * scale) >> 16) |
                      (BFloat16::rounded(high * scale) & 0xffff0000u);
    }
}

OFFLOAD_HD bool contains(const std::uint8_t* codes, int count, std::uint8_t code) {
    std::uint8_t found = 0;
    for (int i = 0; i < count; ++i) {  // vectorised
        found |= codes[i] == code ? 1 : 0;
    }
    return found != 0;
}

#if defined(__GNUC__) && !defined(__clang__)
using Bytes = std::uint8_t __attribute__((vector_size(16)));
using Words = std::uint16_t __attribute__((vector_size(16)));

/// fp8 to bfloat16 by looking up 16 codes at once, on processors that can. A block has one scale,
/// so the rounded mantissa depends on three bits of the code only, and the exponent is added to it:
/// entries 0 to 7 are the denormals, 8 to 15 the binade below the lowest. Needs a scale that
/// `block_scale` makes, with which nothing underflows, and a count that 16 divides. Returns false
/// where a code was NaN: those words are wrong.
OFFLOAD_HD bool decode_fp8_by_table(const std::uint8_t* __restrict codes, int count, float scale,
                                    std::uint16_t* __restrict words) {
    constexpr Bytes kFirst = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    constexpr Bytes kSecond = kFirst + 8;
    constexpr Bytes kLow = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    constexpr std::uint8_t kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    std::uint16_t entries[16];
    decode_any<Fp8, BFloat16>(kCodes, 16, scale, entries);
    Words denormal;
    Words normal;
    memcpy(&denormal, entries, sizeof(denormal));
    memcpy(&normal, entries + 8, sizeof(normal));
    const auto first = reinterpret_cast<Bytes>(denormal);
    const auto second = reinterpret_cast<Bytes>(normal - 0x80);
    const Bytes low_bytes = __builtin_shuffle(first, second, kLow);
    const Bytes high_bytes = __builtin_shuffle(first, second, kLow + 1);
    const Bytes zero = {};
    Bytes nan = {};
    for (int i = 0; i < count; i += 16) {
        Bytes code;
        memcpy(&code, codes + i, sizeof(code));
        const Bytes magnitude = code & 0x7f;
        const Bytes mantissa = (magnitude & 7) | 8;
        const Bytes entry = magnitude < mantissa ? magnitude : mantissa;
        const Bytes exponent = magnitude & 0x78;
        const Bytes low = __builtin_shuffle(low_bytes, entry);
        const Bytes high = __builtin_shuffle(high_bytes, entry) | (code & 0x80);
        nan |= reinterpret_cast<Bytes>(magnitude == Fp8::kNan);
        const auto front =
            reinterpret_cast<Words>(__builtin_shuffle(low, high, kFirst)) +
            (reinterpret_cast<Words>(__builtin_shuffle(exponent, zero, kFirst)) << 4);
        const auto back =
            reinterpret_cast<Words>(__builtin_shuffle(low, high, kSecond)) +
            (reinterpret_cast<Words>(__builtin_shuffle(exponent, zero, kSecond)) << 4);
        memcpy(words + i, &front, sizeof(front));
        memcpy(words + i + 8, &back, sizeof(back));
    }
    std::uint64_t halves[2];
    memcpy(halves, &nan, sizeof(halves));
    return (halves[0] | halves[1]) == 0;
}
#else
OFFLOAD_HD bool decode_fp8_by_table(const std::uint8_t*, int, float, std::uint16_t*) {
    return false;
}
#endif

/// Whether a block may go through the table: a scale from elsewhere than `block_scale` may not.
OFFLOAD_HD bool fits_table(int count, float scale) {
    return count % 16 == 0 && scale >= kSmallestAmax / Fp8::kLimit &&
           scale <= kLargestAmax / Fp8::kLimit;
}

/// Decodes `count` codes. `by_table` tells that the processor looks up bytes in a register.
template <typename Code, typename Type>
OFFLOAD_HD void decode_block(const std::uint8_t* codes, int count, float scale, bool by_table,
                             typename Type::Word* words) {
    if constexpr (std::is_same_v<Type, BFloat16> && std::is_same_v<Code, Int8>) {
        if (count % 2 == 0 && !contains(codes, count, Int8::kNan)) {
            return decode_int8_pairs(codes, count, scale, words);
        }
    }
    if constexpr (std::is_same_v<Type, BFloat16> && std::is_same_v<Code, Fp8>) {
        if (by_table && fits_table(count, scale) &&
            decode_fp8_by_table(codes, count, scale, words)) {
            return;
        }
    }
    decode_any<Code, Type>(codes, count, scale, words);
}

}  // namespace offload::codec
