/// The codecs' arithmetic on single values against the oracle.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "codec_host_kernels.h"
#include "codec_math.h"
#include "codec_oracle.h"
#include "harness.h"

using namespace offload::codec;

namespace {

/// Values around everything that rounding can trip over, in all binades.
std::vector<float> interesting() {
    std::vector<float> values;
    for (int code = 0; code <= 0x7e; ++code) {
        const double value = oracle::fp8_value(code);
        const double middle = (value + oracle::fp8_value(code + 1)) / 2;
        for (const double exact : {value, middle}) {
            const auto narrow = static_cast<float>(exact);
            values.push_back(narrow);
            values.push_back(std::nextafter(narrow, 1e9f));
            values.push_back(std::nextafter(narrow, 0.0f));
        }
    }
    for (std::int32_t binade = 0; binade < 255; ++binade) {
        for (const std::int32_t mantissa : {0, 1, 0x3fffff, 0x400000, 0x400001, 0x7fffff}) {
            values.push_back(from_bits((binade << 23) + mantissa));
        }
    }
    std::mt19937 random(7);
    for (int i = 0; i < 20000; ++i) {
        const auto bits = static_cast<std::int32_t>(random() & 0x7fffffff);
        values.push_back(std::isnan(from_bits(bits)) ? 1.0f : from_bits(bits));
        values.push_back(static_cast<float>(i) / 37.0f);
    }
    return values;
}

constexpr float kLargest = std::numeric_limits<float>::max();

std::uint32_t word_of(float value) { return static_cast<std::uint32_t>(to_bits(value)); }

std::uint16_t half_of(float value) { return Float16::narrow(value); }

}  // namespace

TEST(fp8_rounds_to_the_nearest_code_and_ties_to_even) {
    for (const float value : interesting()) {
        const int expected = oracle::fp8_code(std::min<double>(value, 448));
        const int code = Fp8::encode<Float32, false>(word_of(value), 1.0f, 0);
        CHECK(code == expected);
        CHECK((Fp8::encode<Float32, false>(word_of(-value), 1.0f, 0)) == (expected | 0x80));
        if (value <= 448) {
            CHECK((Fp8::encode_finite(value, 1.0f) & 0xff) == expected);
            CHECK((Fp8::encode_finite(-value, 1.0f) & 0xff) == (expected | 0x80));
        }
    }
}

TEST(int8_rounds_to_the_nearest_integer_and_ties_to_even) {
    for (const float value : interesting()) {
        const auto expected = static_cast<int>(std::nearbyint(std::min(value, 127.0f)));
        for (const int sign : {1, -1}) {
            const float signed_value = static_cast<float>(sign) * value;
            const auto code = static_cast<std::int8_t>(
                Int8::encode<Float32, false>(word_of(signed_value), 1.0f, 0));
            CHECK(code == sign * expected);
            if (value <= 127) {
                const auto finite = static_cast<std::int8_t>(Int8::encode_finite(signed_value, 1));
                CHECK(finite == sign * expected);
            }
        }
    }
}

TEST(every_bfloat16_and_float16_widens_exactly) {
    for (int i = 0; i < 1 << 16; ++i) {
        const auto word = static_cast<std::uint16_t>(i);
        const double brain = oracle::value_of(word, 8);
        const double half = oracle::value_of(word, 5);
        CHECK(BFloat16::widen(word) == brain || std::isnan(brain));
        CHECK(Float16::widen(word) == half || std::isnan(half));
        CHECK(std::isnan(BFloat16::widen(word)) == std::isnan(brain));
        CHECK(std::isnan(Float16::widen(word)) == std::isnan(half));
        CHECK(std::signbit(Float16::widen(word)) == (i >= 0x8000));
        CHECK(is_nan<BFloat16>(word) == std::isnan(brain));
        CHECK(is_nan<Float16>(word) == std::isnan(half));
        CHECK(finite_magnitude<BFloat16>(word) == (std::isfinite(brain) ? i & 0x7fff : 0));
        CHECK(finite_magnitude<Float16>(word) == (std::isfinite(half) ? i & 0x7fff : 0));
    }
}

TEST(narrowing_gives_back_every_word_and_rounds_between_them_to_even) {
    for (int i = 0; i < 0x7bff; ++i) {  // to the largest float16
        const auto word = static_cast<std::uint16_t>(i);
        const auto next = static_cast<std::uint16_t>(i + 1);
        const auto even = static_cast<std::uint16_t>((i + 1) & ~1);
        const float middle = (Float16::widen(word) + Float16::widen(next)) / 2;
        CHECK(half_of(Float16::widen(word)) == word);
        CHECK(half_of(-Float16::widen(word)) == (word | 0x8000));
        CHECK(half_of(middle) == even);
        CHECK(half_of(std::nextafter(middle, 0.0f)) == word);
        CHECK(half_of(std::nextafter(middle, 1e9f)) == next);
    }
    for (int i = 0x0080; i < 0x7f7f; ++i) {
        const auto word = static_cast<std::uint16_t>(i);
        const auto even = static_cast<std::uint16_t>((i + 1) & ~1);
        const float middle = from_bits((i << 16) | 0x8000);
        CHECK(BFloat16::narrow(BFloat16::widen(word)) == word);
        CHECK(BFloat16::narrow(middle) == even);
        CHECK(BFloat16::narrow(std::nextafter(middle, 0.0f)) == word);
        CHECK(BFloat16::narrow(std::nextafter(middle, kLargest)) == i + 1);
    }
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK(half_of(65504.0f) == 0x7bff && half_of(65519.9f) == 0x7bff);
    CHECK(half_of(65520.0f) == 0x7c00 && half_of(-infinity) == 0xfc00);
    CHECK(half_of(from_bits(kQuietNan)) == 0x7e00);
    CHECK(BFloat16::narrow(from_bits(kQuietNan)) == 0x7fc0);
    CHECK(BFloat16::narrow(infinity) == 0x7f80);
}

TEST(every_code_decodes_to_its_value_times_the_scale) {
    for (const float scale : {1.0f, 0.0123f, 0x1p-108f, kLargestAmax / 448.0f}) {
        for (int code = 0; code < 256; ++code) {
            const auto byte = static_cast<std::uint8_t>(code);
            const float fp8 = Fp8::decode(byte, scale);
            const float sign = code >= 128 ? -1.0f : 1.0f;
            const auto exact = static_cast<float>(oracle::fp8_value(code & 0x7f)) * scale * sign;
            CHECK((code & 0x7f) == 0x7f ? std::isnan(fp8) : fp8 == exact);
            CHECK(std::signbit(fp8) == (code >= 128));
            const float int8 = Int8::decode(byte, scale);
            CHECK(code == 0x80
                      ? std::isnan(int8)
                      : int8 == static_cast<float>(static_cast<std::int8_t>(byte)) * scale);
        }
    }
}

TEST(every_bfloat16_is_coded_alike_whatever_way_its_block_takes) {
    std::uint8_t codes[kBlock];
    std::uint16_t words[kBlock];
    for (int i = 0; i < 1 << 16; ++i) {
        const auto word = static_cast<std::uint16_t>(i);
        for (std::uint16_t& other : words) {
            other = word;
        }
        for (const int count : {4, 3}) {  // by pairs, and one by one
            const BlockScale scale = block_scale(
                BFloat16::widen(static_cast<std::uint16_t>(finite_magnitude<BFloat16>(word))),
                Fp8::kLimit);
            CHECK((encode_block<Fp8, BFloat16, false>(words, count, 0, codes)) == scale.scale);
            CHECK(codes[count - 1] == (Fp8::encode<BFloat16, false>(word, scale.inverse, 0)));
        }
    }
}

TEST(nan_of_any_payload_and_sign_becomes_the_code_of_nan) {
    for (const std::uint32_t payload : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7fa5a5a5u}) {
        for (const float inverse : {1.0f, 0x1p-127f * 448, 0x1p100f * 448}) {
            CHECK((Fp8::encode<Float32, false>(payload, inverse, 0)) == 0x7f);
            CHECK((Fp8::encode<Float32, true>(payload | 0x80000000u, inverse, 0.5f)) == 0xff);
            CHECK((Int8::encode<Float32, false>(payload | 0x80000000u, inverse, 0)) == 0x80);
            CHECK((Int8::encode<Float32, true>(payload, inverse, 0.999f)) == 0x80);
        }
    }
}

TEST(scales_neither_overflow_nor_become_denormal) {
    for (const float amax : {0.0f, 0x1p-149f, 0x1p-101f, 0x1p-100f, 1.0f, 0x1.fffffep127f}) {
        for (const float limit : {Fp8::kLimit, Int8::kLimit}) {
            const BlockScale scale = block_scale(amax, limit);
            CHECK(std::isnormal(scale.scale) && std::isnormal(scale.inverse));
            CHECK(std::isnormal(scale.scale * 0x1p-9f));
            CHECK(std::isfinite(scale.scale * limit));
        }
    }
    CHECK(block_scale(448.0f, 448.0f).scale == 1.0f);
}

TEST(random_rounding_takes_the_upper_neighbour_with_the_probability_of_the_fraction) {
    for (const float value : interesting()) {
        if (value > 448) {
            continue;
        }
        const int low = Fp8::encode<Float32, true>(word_of(value), 1.0f, 0x1.fffffep-1f);
        const int high = Fp8::encode<Float32, true>(word_of(value), 1.0f, 0.0f);
        const double below = oracle::fp8_value(low);
        CHECK(below <= value);
        CHECK(high == low + (below < value ? 1 : 0));
        const double fraction = (value - below) / (oracle::fp8_value(low + 1) - below);
        const auto just_under = static_cast<float>(fraction * 0.999);
        const auto just_over = static_cast<float>(fraction * 1.001);
        if (fraction > 1e-6 && fraction < 0.999) {
            CHECK((Fp8::encode<Float32, true>(word_of(value), 1.0f, just_under)) == high);
            CHECK((Fp8::encode<Float32, true>(word_of(value), 1.0f, just_over)) == low);
        }
    }
}

TEST(the_random_numbers_are_uniform_and_differ_between_lanes_blocks_and_seeds) {
    std::vector<int> buckets(64);
    double sum = 0;
    constexpr int kBlocks = 4000;
    for (int block = 0; block < kBlocks; ++block) {
        const std::uint64_t key = random_key(3, block);
        CHECK(key != random_key(3, block + 1) && key != random_key(4, block));
        for (int lane = 0; lane < kBlock; ++lane) {
            const float uniform = random_uniform(key, lane);
            CHECK(uniform >= 0 && uniform < 1);
            sum += uniform;
            ++buckets[static_cast<std::size_t>(uniform * 64)];
        }
    }
    const double expected = kBlocks * kBlock / 64.0;
    double chi_squared = 0;
    for (const int count : buckets) {
        chi_squared += (count - expected) * (count - expected) / expected;
    }
    CHECK(chi_squared < 120);  // 63 degrees of freedom: above with a probability of 2e-5
    CHECK(std::fabs(sum / (kBlocks * kBlock) - 0.5) < 0.002);
}

TEST(bits_are_packed_from_the_lowest_and_any_byte_but_zero_is_true) {
    for (int bits = 0; bits < 256; ++bits) {
        for (const std::uint64_t truth : {0x01u, 0x80u, 0xffu, 0x40u}) {
            std::uint64_t bools = 0;
            std::uint64_t ones = 0;
            for (int i = 0; i < 8; ++i) {
                bools |= (bits >> i & 1) != 0 ? truth << (8 * i) : 0;
                ones |= static_cast<std::uint64_t>(bits >> i & 1) << (8 * i);
            }
            CHECK(pack_bits(bools) == bits);
            CHECK(unpack_bits(static_cast<std::uint8_t>(bits)) == ones);
        }
    }
}
