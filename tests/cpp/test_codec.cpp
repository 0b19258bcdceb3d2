/// Whole tensors: strides, blocks, threads, and all lanes of a card's kernels in turn.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "codec.h"
#include "codec_lane.h"
#include "codec_layout.h"
#include "codec_oracle.h"
#include "harness.h"

using namespace offload;
using codec::BFloat16;
using codec::Float16;
using codec::Float32;
using codec::Fp8;
using codec::Int8;
using codec::StridedMap;

namespace {

TensorLayout layout_of(std::vector<std::int64_t> shape, std::vector<std::int64_t> stride,
                       DType dtype = DType::kBFloat16) {
    TensorLayout layout;
    layout.dims = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), layout.shape);
    std::copy(stride.begin(), stride.end(), layout.stride);
    layout.dtype = dtype;
    return layout;
}

TensorLayout contiguous(std::vector<std::int64_t> shape, DType dtype = DType::kBFloat16) {
    std::vector<std::int64_t> stride(shape.size(), 1);
    for (std::size_t dim = shape.size(); dim-- > 1;) {
        stride[dim - 1] = stride[dim] * shape[dim];
    }
    return layout_of(std::move(shape), std::move(stride), dtype);
}

/// Offsets of all elements in row-major order, by counting.
std::vector<std::int64_t> offsets_of(const TensorLayout& layout) {
    std::vector<std::int64_t> offsets = {0};
    for (int dim = 0; dim < layout.dims; ++dim) {
        std::vector<std::int64_t> finer;
        for (const std::int64_t offset : offsets) {
            for (std::int64_t i = 0; i < layout.shape[dim]; ++i) {
                finer.push_back(offset + i * layout.stride[dim]);
            }
        }
        offsets = std::move(finer);
    }
    return offsets;
}

struct alignas(16) Chunk {
    std::uint8_t bytes[16];
};

/// Bytes aligned as the codecs want them; they start as 0xee.
class Buffer {
   public:
    explicit Buffer(std::size_t bytes) : chunks_(bytes / 16 + 1), bytes_(bytes) {
        std::memset(chunks_.data(), 0xee, chunks_.size() * 16);
    }
    std::uint8_t* data() { return chunks_.front().bytes; }
    bool operator==(const Buffer& other) const {
        return std::memcmp(chunks_.data(), other.chunks_.data(), bytes_) == 0;
    }

   private:
    std::vector<Chunk> chunks_;
    std::size_t bytes_;
};

std::vector<std::uint16_t> random_words(std::size_t count) {
    std::vector<std::uint16_t> words(count);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::uint16_t& word : words) {
        word = BFloat16::narrow(normal(random));
    }
    for (std::size_t i = 5; i < count; i += 97) {
        words[i] = static_cast<std::uint16_t>(random());  // Inf, NaN, denormals among them
    }
    return words;
}

const std::vector<TensorLayout>& layouts() {
    static const std::vector<TensorLayout> all = {
        layout_of({}, {}),
        contiguous({1}),
        contiguous({127}),
        contiguous({3, 128}),
        contiguous({5, 256, 3}),
        contiguous({2, 3, 300}),
        layout_of({300, 4}, {1, 300}),        // transposed
        layout_of({4, 256}, {600, 2}),        // every second
        layout_of({3, 4, 200}, {0, 200, 1}),  // expanded
        layout_of({2, 7, 130}, {0, 1, 0}),    // expanded in the last
        layout_of({2, 3, 4, 5, 2, 2, 3, 130}, {70200, 23400, 5850, 1170, 585, 290, 135, 1}),
        layout_of({3, 1, 260, 1}, {260, 7, 1, 9}),  // sizes of 1 anywhere
        layout_of({4, 128}, {128, 1}),
        layout_of({6, 130}, {132, 1}),  // rows with a gap, 8-byte aligned
        layout_of({5, 12}, {12, 1}),
    };
    return all;
}

template <typename Code, typename Type>
void encode_like_a_card(const StridedMap& map, const typename Type::Word* source,
                        std::uint8_t* encoded, const std::optional<std::uint64_t>& seed) {
    auto* const scales = reinterpret_cast<float*>(encoded + codec::scales_offset(map));
    for (std::int64_t index = 0; index < map.blocks(); ++index) {
        const codec::Block block = codec::block_at(map, index);
        std::int32_t largest = 0;
        const auto words_of = [&](int lane) {
            const int begin = lane * codec::kLaneValues;
            return codec::load_lane(source + block.source(map) + begin * map.step, map.step,
                                    block.count(map) - begin);
        };
        for (int lane = 0; lane < codec::kLanes; ++lane) {
            largest = std::max(largest, codec::largest_of_lane<Type>(words_of(lane)));
        }
        const codec::BlockScale scale = codec::scale_of<Code, Type>(largest);
        scales[index] = scale.scale;
        for (int lane = 0; lane < codec::kLanes; ++lane) {
            const int begin = lane * codec::kLaneValues;
            const auto codes =
                seed.has_value()
                    ? codec::encode_lane<Code, Type, true>(words_of(lane), lane, scale.inverse,
                                                           codec::random_key(*seed, index))
                    : codec::encode_lane<Code, Type, false>(words_of(lane), lane, scale.inverse, 0);
            codec::store_lane(codes, encoded + block.codes(map) + begin, 1,
                              block.count(map) - begin);
        }
    }
}

template <typename Code, typename Type>
void decode_like_a_card(const StridedMap& map, const std::uint8_t* encoded,
                        typename Type::Word* destination) {
    const auto* const scales = reinterpret_cast<const float*>(encoded + codec::scales_offset(map));
    for (std::int64_t index = 0; index < map.blocks(); ++index) {
        const codec::Block block = codec::block_at(map, index);
        for (int lane = 0; lane < codec::kLanes; ++lane) {
            const int begin = lane * codec::kLaneValues;
            const int count = block.count(map) - begin;
            const auto codes = codec::load_lane(encoded + block.codes(map) + begin, 1, count);
            codec::store_lane(codec::decode_lane<Code, Type>(codes, scales[index]),
                              destination + block.source(map) + begin * map.step, map.step, count);
        }
    }
}

/// Runs one layout with one codec and type through host code and through the lanes.
template <typename Code, typename Type>
void compare_with_lanes(Codec which, TensorLayout layout, DType dtype,
                        const std::vector<std::uint16_t>& memory, int shift) {
    using Word = typename Type::Word;
    layout.dtype = dtype;
    const auto* const source = reinterpret_cast<const Word*>(memory.data()) + shift;
    const StridedMap map = codec::source_map("test", which, layout);
    const std::size_t bytes = encoded_bytes(which, layout);
    for (const auto& seed : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(11)}) {
        Buffer host(bytes);
        Buffer card(bytes);
        encode_host(which, layout, source, host.data(), seed, 1);
        encode_like_a_card<Code, Type>(map, source, card.data(), seed);
        CHECK(host == card);
        const TensorLayout dense = contiguous({layout.shape, layout.shape + layout.dims}, dtype);
        const auto elements = static_cast<std::size_t>(map.elements());
        std::vector<Word> by_host(elements + 1);
        std::vector<Word> by_card(elements + 1);
        decode_host(which, dense, host.data(), by_host.data() + 1, 1);
        decode_like_a_card<Code, Type>(codec::destination_map("test", which, dense), card.data(),
                                       by_card.data() + 1);
        CHECK(by_host == by_card);
    }
}

}  // namespace

TEST(blocks_and_elements_lie_where_counting_finds_them) {
    for (const TensorLayout& layout : layouts()) {
        const auto offsets = offsets_of(layout);
        const StridedMap map = codec::source_map("test", Codec::kFp8, layout);
        CHECK(map.elements() == static_cast<std::int64_t>(offsets.size()));
        std::int64_t element = 0;
        codec::Block walked = codec::block_at(map, 0);
        for (std::int64_t index = 0; index < map.blocks(); ++index) {
            const codec::Block block = codec::block_at(map, index);
            CHECK(block.index == walked.index && block.source(map) == walked.source(map));
            CHECK(block.codes(map) == walked.codes(map) && block.count(map) == walked.count(map));
            CHECK(block.codes(map) == element);
            for (int i = 0; i < block.count(map); ++i, ++element) {
                CHECK(block.source(map) + i * map.step ==
                      offsets[static_cast<std::size_t>(element)]);
                CHECK(map.element_offset(element) == offsets[static_cast<std::size_t>(element)]);
            }
            if (index + 1 < map.blocks()) {
                walked = codec::next_block(map, walked);
            }
        }
        CHECK(element == map.elements());
    }
}

TEST(offsets_beyond_32_bits_are_found) {
    const std::int64_t far = std::int64_t{1} << 40;
    const TensorLayout layout = layout_of({3, 1 << 20, 256}, {far, 1 << 12, 1});
    const StridedMap map = codec::source_map("test", Codec::kInt8, layout);
    const codec::Block last = codec::block_at(map, map.blocks() - 1);
    CHECK(last.source(map) == 2 * far + ((std::int64_t{1} << 20) - 1) * (1 << 12) + 128);
    CHECK(last.codes(map) == map.elements() - 128);
    CHECK(map.element_offset(map.elements() - 1) == last.source(map) + 127);
}

TEST(neighbouring_dimensions_are_walked_as_one) {
    const StridedMap whole = codec::source_map("test", Codec::kFp8, contiguous({4, 5, 6, 256}));
    CHECK(whole.rows == 1 && whole.outer_dims == 0 && whole.row_length == 4 * 5 * 6 * 256);
    const StridedMap ragged = codec::source_map("test", Codec::kFp8, contiguous({4, 5, 6, 100}));
    CHECK(ragged.rows == 120 && ragged.outer_dims == 1 && ragged.row_length == 100);
    const StridedMap packed =
        codec::source_map("test", Codec::kBits, contiguous({4, 5, 6, 100}, DType::kBool));
    CHECK(packed.rows == 1 && packed.row_length == 12000);
}

TEST(all_lanes_of_a_card_write_what_the_host_writes) {
    const std::vector<std::uint16_t> memory = random_words(2 * 300000);
    for (const TensorLayout& layout : layouts()) {
        for (const int shift : {0, 1}) {  // aligned for wide accesses, and not
            compare_with_lanes<Fp8, BFloat16>(Codec::kFp8, layout, DType::kBFloat16, memory, shift);
            compare_with_lanes<Int8, BFloat16>(Codec::kInt8, layout, DType::kBFloat16, memory,
                                               shift);
            compare_with_lanes<Fp8, Float16>(Codec::kFp8, layout, DType::kFloat16, memory, shift);
            compare_with_lanes<Int8, Float16>(Codec::kInt8, layout, DType::kFloat16, memory, shift);
            compare_with_lanes<Fp8, Float32>(Codec::kFp8, layout, DType::kFloat32, memory, shift);
            compare_with_lanes<Int8, Float32>(Codec::kInt8, layout, DType::kFloat32, memory, shift);
        }
    }
}

TEST(codes_follow_the_documented_expression) {
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    std::vector<float> values(300 * codec::kBlock);
    for (std::size_t row = 0; row < 300; ++row) {
        float* const block = values.data() + row * codec::kBlock;
        const float amax = std::fabs(normal(random)) + 1;
        for (int i = 0; i < codec::kBlock; ++i) {
            // Within a bit of a tie, so that a last bit of the factor decides.
            const double tie = (oracle::fp8_value(i) + oracle::fp8_value(i + 1)) / 2;
            block[i] = static_cast<float>(tie * amax / 448);
            block[i] = std::nextafter(block[i], (random() & 1) != 0 ? 0.0f : 2 * amax);
        }
        block[126] = block[127] = -amax;
    }
    const TensorLayout layout = contiguous({300, codec::kBlock}, DType::kFloat32);
    Buffer encoded(encoded_bytes(Codec::kFp8, layout));
    encode_host(Codec::kFp8, layout, values.data(), encoded.data());
    const auto* const scales = reinterpret_cast<const float*>(encoded.data() + values.size());
    for (std::size_t row = 0; row < 300; ++row) {
        const float* const block = values.data() + row * codec::kBlock;
        float amax = 0;
        for (int i = 0; i < codec::kBlock; ++i) {
            amax = std::max(amax, std::fabs(block[i]));
        }
        CHECK(scales[row] == amax / 448.0f);
        const float inverse = 448.0f / amax;
        for (int i = 0; i < codec::kBlock; ++i) {
            const float scaled = std::fabs(block[i]) * inverse;
            const int code = encoded.data()[row * codec::kBlock + static_cast<std::size_t>(i)];
            CHECK((code & 0x7f) == oracle::fp8_code(scaled));
        }
    }
}

TEST(a_scale_that_no_encoder_makes_decodes_alike) {
    const TensorLayout layout = contiguous({256});
    for (const float scale : {0.0f, 0x1p-120f, 0x1p-140f, -1.5f, 1e38f}) {
        Buffer encoded(encoded_bytes(Codec::kFp8, layout));
        for (int code = 0; code < 256; ++code) {
            const bool nan = (code & 0x7f) == 0x7f;  // would take the block another way
            encoded.data()[code] = static_cast<std::uint8_t>(nan ? 0 : code);
        }
        std::memcpy(encoded.data() + 256, &scale, sizeof(scale));
        std::memcpy(encoded.data() + 260, &scale, sizeof(scale));
        std::vector<std::uint16_t> by_host(256);
        std::vector<std::uint16_t> by_card(256);
        decode_host(Codec::kFp8, layout, encoded.data(), by_host.data());
        decode_like_a_card<Fp8, BFloat16>(codec::source_map("test", Codec::kFp8, layout),
                                          encoded.data(), by_card.data());
        CHECK(by_host == by_card);
    }
}

TEST(a_strided_tensor_is_coded_like_its_contiguous_copy) {
    const std::vector<std::uint16_t> memory = random_words(300000);
    for (const TensorLayout& layout : layouts()) {
        std::vector<std::uint16_t> copy;
        for (const std::int64_t offset : offsets_of(layout)) {
            copy.push_back(memory[static_cast<std::size_t>(offset)]);
        }
        const TensorLayout dense = contiguous({layout.shape, layout.shape + layout.dims});
        Buffer expected(encoded_bytes(Codec::kFp8, dense));
        Buffer strided(encoded_bytes(Codec::kFp8, layout));
        encode_host(Codec::kFp8, dense, copy.data(), expected.data());
        encode_host(Codec::kFp8, layout, memory.data(), strided.data());
        CHECK(strided == expected);
    }
}

TEST(bools_of_any_layout_come_back_and_bits_beyond_the_last_are_zero) {
    std::vector<std::uint8_t> memory(300000);
    std::mt19937 random(2);
    for (std::uint8_t& value : memory) {
        value = random() % 3 == 0;
    }
    for (TensorLayout layout : layouts()) {
        layout.dtype = DType::kBool;
        const auto offsets = offsets_of(layout);
        const std::size_t bytes = encoded_bytes(Codec::kBits, layout);
        CHECK(bytes == (offsets.size() + 7) / 8);
        Buffer encoded(bytes);
        encode_host(Codec::kBits, layout, memory.data() + 3, encoded.data());
        const auto used = static_cast<unsigned>((offsets.size() - 1) % 8 + 1);
        CHECK(encoded.data()[bytes - 1] >> used == 0);
        std::vector<std::uint8_t> back(offsets.size());
        const TensorLayout dense =
            contiguous({layout.shape, layout.shape + layout.dims}, DType::kBool);
        decode_host(Codec::kBits, dense, encoded.data(), back.data());
        for (std::size_t i = 0; i < offsets.size(); ++i) {
            CHECK(back[i] == memory[static_cast<std::size_t>(offsets[i]) + 3]);
        }
    }
}

TEST(helpers_write_what_one_thread_writes) {
    const TensorLayout layout = contiguous({700, 1003});
    const std::vector<std::uint16_t> source = random_words(700 * 1003);
    for (const Codec which : {Codec::kFp8, Codec::kInt8}) {
        Buffer alone(encoded_bytes(which, layout));
        encode_host(which, layout, source.data(), alone.data(), std::nullopt, 1);
        std::vector<std::uint16_t> expected(source.size());
        decode_host(which, layout, alone.data(), expected.data(), 1);
        for (const int threads : {0, 2, 3, 7}) {
            Buffer together(encoded_bytes(which, layout));
            encode_host(which, layout, source.data(), together.data(), std::nullopt, threads);
            CHECK(together == alone);
            std::vector<std::uint16_t> decoded(source.size());
            decode_host(which, layout, together.data(), decoded.data(), threads);
            CHECK(decoded == expected);
        }
    }
}

TEST(several_threads_may_encode_at_once) {
    const TensorLayout layout = contiguous({500, 1003});
    const std::vector<std::uint16_t> source = random_words(500 * 1003);
    Buffer expected(encoded_bytes(Codec::kFp8, layout));
    encode_host(Codec::kFp8, layout, source.data(), expected.data(), 5, 1);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
        callers.emplace_back([&] {
            Buffer encoded(encoded_bytes(Codec::kFp8, layout));
            encode_host(Codec::kFp8, layout, source.data(), encoded.data(), 5, 3);
            CHECK(encoded == expected);
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
}

TEST(decoding_refuses_a_destination_that_overlaps_itself) {
    Buffer encoded(4096);
    std::vector<std::uint16_t> memory(4096);
    const auto decode = [&](const TensorLayout& layout) {
        decode_host(Codec::kFp8, layout, encoded.data(), memory.data());
    };
    CHECK_THROWS(Error, decode(layout_of({2, 100}, {0, 1})));
    CHECK_THROWS(Error, decode(layout_of({100}, {0})));
    CHECK_THROWS(Error, decode(layout_of({10, 8}, {1, 1})));  // a sliding window
    CHECK_THROWS(Error, decode(layout_of({3, 4, 8}, {8, 16, 1})));
    decode(layout_of({1, 100}, {0, 1}));
    decode(layout_of({0, 100}, {0, 1}));
    decode(layout_of({8, 10}, {1, 8}));
    decode(layout_of({3, 4, 8}, {8, 24, 1}));
}

TEST(wrong_layouts_are_refused) {
    CHECK_THROWS(Error, encoded_bytes(Codec::kBits, contiguous({3}, DType::kFloat32)));
    CHECK_THROWS(Error, encoded_bytes(Codec::kFp8, contiguous({3}, DType::kBool)));
    CHECK_THROWS(Error, encoded_bytes(Codec::kFp8, contiguous({-3})));
    TensorLayout deep = contiguous({1, 1, 1, 1, 1, 1, 1, 1});
    CHECK(encoded_bytes(Codec::kFp8, deep) == 20);
    deep.dims = 9;
    CHECK_THROWS(Error, encoded_bytes(Codec::kFp8, deep));
    CHECK_THROWS(Error, codec_of("test", "zip"));
    CHECK_THROWS(Error, dtype_of("test", "float64"));
    Buffer encoded(64);
    std::uint16_t word = 0;
    CHECK_THROWS(Error, encode_host(Codec::kFp8, layout_of({}, {}), &word, encoded.data() + 1));
}

TEST(a_build_without_cuda_says_what_to_do) {
    if (built_with_cuda()) {
        return harness::skip("this build has CUDA");
    }
    Buffer encoded(64);
    std::uint16_t word = 0;
    CHECK_THROWS(Error, encode_cuda(0, Codec::kFp8, contiguous({1}), &word, encoded.data(), 0));
    CHECK_THROWS(Error, decode_cuda(0, Codec::kFp8, contiguous({1}), encoded.data(), &word, 0));
}
